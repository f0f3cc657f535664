"""The real huggingface_hub client against a stand-in for the Hub's HTTP interface on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny_models import llama, save_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny-llama"


def blob_id(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _handler(folder: Path, requests: list[str]) -> type[BaseHTTPRequestHandler]:
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            requests.append(self.path)
            if "org/gated" in self.path:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif f"/api/models/{REPO}" in self.path and "/revision/no-such" in self.path:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif self.path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
                tree = [
                    {"type": "file", "path": f, "oid": blob_id(folder / f), "size": (folder / f).stat().st_size}
                    for f in files
                ]
                self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            elif self.path.startswith(f"/api/models/{REPO}"):
                info = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            elif self.path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
                body = (folder / self.path.split(COMMIT + "/")[1]).read_bytes()
                etag = blob_id(folder / self.path.split(COMMIT + "/")[1])
                self._send(200, body if with_body else b"", {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, len(body))
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _send(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], list[str], Path]]:
    """Environment for a client of the stand-in, the requests it got, and the folder it serves."""
    folder = save_folder(llama(), tmp_path_factory.mktemp("hub") / "model", max_shard_size="20KB")
    (folder / "pytorch_model.bin").write_bytes(b"legacy weights nobody asked for")
    (folder / "stray.safetensors").write_bytes(b"not in the index")
    requests: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(folder, requests))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("hf-home")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    yield environment, requests, folder
    server.shutdown()


def test_an_estimate_fetches_the_config_alone(hub: tuple[dict[str, str], list[str], Path], tmp_path: Path) -> None:
    environment, requests, _ = hub
    environment = {**environment, "HF_HOME": str(tmp_path)}
    before = len(requests)
    for src, code, words in (
        (REPO, 0, "2 blocks"),
        ("org/gated", 1, "is gated"),
        ("org/no-such", 1, "neither a local"),
    ):
        command = [sys.executable, "-m", "ckptool", "estimate", src]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
    fetched = [path for path in requests[before:] if f"/{REPO}/resolve/" in path]
    assert {path.rpartition("/")[2] for path in fetched} == {"config.json"}


def run(environment: dict[str, str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptool", "import-hf", *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_import_from_the_hub_as_typed_then_offline(hub: tuple[dict[str, str], list[str], Path], tmp_path: Path) -> None:
    environment, requests, folder = hub
    done = run(environment, REPO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "ckpt" / "tiny-llama"
    record = json.loads((checkpoint / "ckptool.json").read_text())
    assert record["source"]["repo"] == REPO
    assert record["source"]["commit"] == COMMIT
    assert (checkpoint / "hf" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not any("pytorch_model.bin" in path or "stray" in path for path in requests)
    again = run({**environment, "HF_HUB_OFFLINE": "1"}, REPO, "second", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("arguments", "offline", "says"),
    [
        (["org/gated"], False, "gated"),
        (["org/nothing-here"], False, "neither a local path nor a Hub repository"),
        ([REPO, "--revision", "no-such"], False, "no revision 'no-such'"),
        (["org/never-fetched"], True, "not in the local Hub cache"),
        (["./no/such/folder"], False, "no such file or folder"),
    ],
)
def test_each_way_to_miss_a_model_is_one_clear_line(
    hub: tuple[dict[str, str], list[str], Path], tmp_path: Path, arguments: list[str], offline: bool, says: str
) -> None:
    environment = {**hub[0], **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    done = run(environment, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    first = done.stderr.strip().splitlines()[0]
    assert first.startswith("error: ") and says in first
    assert "Traceback" not in done.stderr
