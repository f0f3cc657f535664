"""A stand-in for the Hub's HTTP interface on loopback: repositories with commits and branches, files in git and in LFS.

The endpoints are those that huggingface_hub calls (hf_api.py, _commit_api.py, lfs.py, file_download.py). LFS files are
answered with a redirect to another origin and a signed URL, as the Hub does.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_VerySecretToken0123456789"
SIGNATURE = "SignatureThatNobodyMaySee"
LFS_BYTES = 4096


@dataclass(frozen=True)
class File:
    content: bytes
    is_lfs: bool

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def described(self) -> dict[str, Any]:
        size = len(self.content)
        lfs = {"oid": self.sha256, "sha256": self.sha256, "size": size, "pointerSize": 134}
        return {"size": size, "blobId": self.blob_id, **({"lfs": lfs} if self.is_lfs else {})}

    @property
    def mark(self) -> str:
        return self.sha256 if self.is_lfs else self.blob_id


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, File], title: str) -> str:
        names = json.dumps([sorted((name, file.blob_id) for name, file in files.items()), len(self.titles)])
        sha = hashlib.sha1(names.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.titles.append(title)
        return sha

    def files(self, revision: str = "main") -> dict[str, File] | None:
        return self.commits.get(self.branches.get(revision, revision))


#: What to do to a request, told from its method and its path: "", a status, one with the seconds of Retry-After
#: ("429 7") or of RateLimit ("429 t7"), "cut" (half of the body comes), "whole" (all of it, whatever the range),
#: "other" (other bytes under another ETag), or "lost" (done, but not answered).
Fault = Callable[[str, str], str]


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.tokens_elsewhere: list[str] = []
        self.fault: Fault = lambda method, path: ""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def cdn(self) -> str:
        """Another origin than `url`."""
        return f"http://localhost:{self.server_address[1]}"

    def add(self, repo: str, folder: Path, branch: str = "main", **options: Any) -> str:
        """A commit of a folder's files; returns its id."""
        files = {
            path.relative_to(folder).as_posix(): File(path.read_bytes(), path.suffix in (".safetensors", ".bin"))
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.lfs.update({file.sha256: file.content for file in files.values()})
        return self.repos.setdefault(repo, Repo(**options)).commit(branch, files, "add")

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.requests)

    def times(self, number: int, method: str, part: str, fault: str) -> None:
        """Let the first `number` requests of this kind fail."""
        left = [number]

        def choose(its_method: str, path: str) -> str:
            if its_method == method and part in path and left[0] > 0:
                left[0] -= 1
                return fault
            return ""

        self.fault = choose


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.requests.append((self.command, path))
            if self.headers.get("Host", "").startswith("localhost") and "Authorization" in self.headers:
                self.server.tokens_elsewhere.append(self.headers["Authorization"])
            fault = self.server.fault(self.command, path)
        if fault[:3].isdigit():
            status, _, seconds = fault.partition(" ")
            headers = {"Retry-After": seconds} if seconds else {}
            if seconds.startswith("t"):
                headers = {"RateLimit": f'"resolvers";r=0;t={seconds[1:]}'}
            self._send(int(status), b'{"error": "no, at %s"}' % self.path.encode(), headers)
            return
        for pattern, answer in _ROUTES:
            if match := re.fullmatch(pattern, path):
                with self.server.lock:
                    answer(self, body, fault, *match.groups())
                return
        self._send(404, b"")

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.close_connection = True

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": f"no: {code}"})

    def _repo(self, name: str) -> Repo | None:
        """The repository, when it may be seen; else None, answered."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and not self._is_owner()):
            self._refuse(404 if self._is_owner() else 401, "RepoNotFound")
            return None
        return repo

    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _info(self, body: bytes, fault: str, name: str, revision: str | None) -> None:
        if (repo := self._repo(name)) is None:
            return
        files = repo.files(revision or "main")
        if files is None:
            self._refuse(404, "RevisionNotFound")
            return
        sha = repo.branches.get(revision or "main", revision)
        siblings = [{"rfilename": path, **file.described()} for path, file in sorted(files.items())]
        self._json({"id": name, "sha": sha, "private": repo.private, "gated": repo.gated, "siblings": siblings})

    def _tree(self, body: bytes, fault: str, name: str, revision: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if (files := repo.files(revision)) is None:
            self._refuse(404, "RevisionNotFound")
            return
        folders = {str(parent) for path in files for parent in Path(path).parents} - {"."}
        rows: list[dict[str, Any]] = [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]
        for path, file in sorted(files.items()):
            rows.append({"type": "file", "path": path, "oid": file.blob_id, **file.described()})
        self._json(rows)

    def _resolve(self, body: bytes, fault: str, name: str, revision: str, path: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if repo.gated and not self._is_owner():
            self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
            return
        files = repo.files(revision)
        if files is None or path not in files:
            self._refuse(404, "RevisionNotFound" if files is None else "EntryNotFound")
            return
        file = files[path]
        if fault == "other":
            file = File(bytes(len(file.content)), file.is_lfs)
        headers = {"X-Repo-Commit": repo.branches.get(revision, revision)}
        if not file.is_lfs:
            self._ranges(file.content, {**headers, "ETag": f'"{file.mark}"'}, fault)
            return
        linked = {"X-Linked-Etag": f'"{file.mark}"', "X-Linked-Size": str(len(file.content))}
        location = f"{self.server.cdn}/cdn/{file.sha256}?X-Amz-Signature={SIGNATURE}"
        self._send(302, b"", {**headers, **linked, "Location": location})

    def _cdn(self, body: bytes, fault: str, oid: str) -> None:
        if SIGNATURE not in self.path:
            self._send(403, b"")
            return
        content = self.server.lfs[oid]
        self._ranges(bytes(len(content)) if fault == "other" else content, {"ETag": f'"cdn-{oid[:8]}{fault}"'}, fault)

    def _ranges(self, content: bytes, headers: dict[str, str], fault: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if fault != "whole" else None
        part = content
        if match:
            start, end = int(match[1]), int(match[2]) + 1 if match[2] else len(content)
            part = content[start:end]
            headers = {**headers, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}
        self._send(206 if match else 200, part, headers, len(part) // 2 if fault == "cut" else None)

    def _whoami(self, body: bytes, fault: str) -> None:
        if not self._is_owner():
            self._send(401, b'{"error": "Invalid credentials in Authorization header"}')
            return
        self._json({"name": "me", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "write"}}})

    def _create(self, body: bytes, fault: str) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not self._is_owner():
            self._send(401, b"")
        elif name in self.server.repos:
            self._json({"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}, 409)
        else:
            repo = self.server.repos[name] = Repo(private=asked.get("visibility") == "private")
            repo.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit")
            self._json({"url": f"{self.server.url}/{name}"})

    def _branch(self, body: bytes, fault: str, name: str, branch: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if branch in repo.branches:
            self._send(409, b"")
            return
        start = json.loads(body).get("startingPoint", "main")
        repo.branches[branch] = repo.branches.get(start, start)
        self._json({}, 201)

    def _preupload(self, body: bytes, fault: str, name: str, revision: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if not self._is_owner():
            self._send(403, b"")
            return
        present = repo.files(revision) or {}
        modes = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            is_lfs = path.endswith(".safetensors") or file["size"] > LFS_BYTES * 100
            oid = present[path].mark if path in present else None
            modes.append(
                {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}
            )
        self._json({"files": modes})

    def _batch(self, body: bytes, fault: str, name: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            answer: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.lfs:
                href = f"{self.server.cdn}/lfs/{asked['oid']}?X-Amz-Signature={SIGNATURE}"
                answer["actions"] = {
                    "upload": {"href": href},
                    "verify": {"href": f"{self.server.url}/verify"},
                }
            objects.append(answer)
        self._json({"objects": objects, "transfer": "basic"})

    def _upload(self, body: bytes, fault: str, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._send(400, b"")
            return
        self.server.lfs[oid] = body
        self._send(200, b"")

    def _verify(self, body: bytes, fault: str) -> None:
        self._send(200 if json.loads(body)["oid"] in self.server.lfs else 404, b"{}")

    def _commit(self, body: bytes, fault: str, name: str, branch: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if branch not in repo.branches:
            self._refuse(404, "RevisionNotFound")
            return
        files = dict(repo.files(branch) or {})
        title = ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    title = value["summary"]
                    if value.get("parentCommit") not in (None, repo.branches[branch]):
                        self._json({"error": "A commit has happened since"}, 412)
                        return
                case "file":
                    files[value["path"]] = File(base64.b64decode(value["content"]), False)
                case "lfsFile":
                    files[value["path"]] = File(self.server.lfs[value["oid"]], True)
                case "deletedFile":
                    del files[value["path"]]
        sha = repo.commit(branch, files, title)
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})

    def _yaml(self, body: bytes, fault: str) -> None:
        self._json({"errors": [], "warnings": []})


_NAME = r"([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"/api/whoami-v2", _Handler._whoami),
    (r"/api/repos/create", _Handler._create),
    (r"/api/validate-yaml", _Handler._yaml),
    (rf"/api/models/{_NAME}(?:/revision/(.+))?", _Handler._info),
    (rf"/api/models/{_NAME}/tree/(.+)", _Handler._tree),
    (rf"/api/models/{_NAME}/branch/(.+)", _Handler._branch),
    (rf"/api/models/{_NAME}/preupload/(.+)", _Handler._preupload),
    (rf"/api/models/{_NAME}/commit/(.+)", _Handler._commit),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler._resolve),
    (r"/cdn/([0-9a-f]+)", _Handler._cdn),
    (r"/lfs/([0-9a-f]+)", _Handler._upload),
    (r"/verify", _Handler._verify),
)
