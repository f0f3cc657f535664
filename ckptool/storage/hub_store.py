"""A repository of the Hugging Face Hub at one commit, read in ranges through huggingface_hub's session.

URLs are those of huggingface_hub: `hf://[datasets/|spaces/]USER/NAME[@REVISION][/PATH]`. What the Hub says of a file
beside its bytes: https://huggingface.co/docs/hub/api and `get_hf_file_metadata` of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin, urlsplit

from ckptool.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from ckptool.storage.hub_calls import asked, final_error, hub_calls
from ckptool.storage.store import GivenUp, Store, StoredFile, retried

_URL = re.compile(
    r"hf://(?:(?P<kind>datasets|spaces)/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?"
    r"(?:/(?P<inside>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_REDIRECTS = 20
_TIMEOUT_SECONDS = 30.0
_LONGEST_WHOLE_BYTES = 64 << 20


@dataclass(frozen=True)
class HubUrl:
    """What an hf:// URL names: `kind` is model, dataset or space; `inside` is a path in the repository."""

    kind: str
    repo: str
    revision: str | None
    inside: str


def parse_hub_url(url: str) -> HubUrl | None:
    """None for what is no URL of a repository; buckets (`hf://buckets/...`) are stores, and no repositories."""
    found = _URL.fullmatch(url.rstrip("/"))
    if found is None or url.startswith("hf://buckets/"):
        return None
    kind = (found["kind"] or "models").removesuffix("s")
    revision = unquote(found["revision"]) if found["revision"] else None
    return HubUrl(kind, found["repo"], revision, found["inside"] or "")


class HubStore(Store):
    """The files of a repository, all of the one commit that its revision meant when it was first asked.

    Every range is held against that commit, and against the size and the mark of the content (the SHA-256 of large
    files, git's blob id of small ones) in its list of files. For reading only.
    """

    def __init__(self, url: str, commit: str | None = None) -> None:
        """`commit` is what the URL's revision means, where that is known. Raises UsageError for another URL."""
        super().__init__(url)
        found = parse_hub_url(self.url)
        if found is None:
            raise UsageError(f"{self.shown}: write hf://USER/NAME, hf://USER/NAME@REVISION or a path below")
        self.hub = found
        is_commit = found.revision is not None and _COMMIT.fullmatch(found.revision)
        self._commit = found.revision if is_commit else commit
        #: Where the Hub has sent us for a file's bytes, and the ETag there. Signed, so good for a while; never shown.
        self._links: dict[str, tuple[str, str | None]] = {}

    def __reduce__(self) -> tuple[type[Store], tuple[Any, ...]]:
        return HubStore, (self.url, self._commit)

    def above(self) -> Store:
        if not self.hub.inside:
            raise UsageError(f"{self.shown} is a whole repository: there is no folder above it")
        return HubStore(self.url.rpartition("/")[0], self._commit)

    @property
    def num_copies(self) -> int:
        return 1

    @property
    def commit(self) -> str:
        """The commit that is read. Raises NotFoundError or AccessError."""
        if self._commit is None:
            from huggingface_hub import HfApi

            hub = self.hub
            info = asked(
                hub.repo, hub.revision, lambda: HfApi().repo_info(hub.repo, revision=hub.revision, repo_type=hub.kind)
            )
            self._commit = str(info.sha)
        return self._commit

    def check_writable(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.shown}: repositories of the Hub are only read here",
            hint="ckptool export NAME --to hf --push USER/NAME, or ckptool push FOLDER USER/NAME",
        )

    def put(self, name: str, path: Path) -> StoredFile:
        self.check_writable()

    def remove(self, name: str) -> None:
        self.check_writable()

    def _list(self) -> dict[str, StoredFile]:
        from huggingface_hub import HfApi

        hub, commit = self.hub, self.commit
        with hub_calls(hub.repo, hub.revision):  # the library tries again by itself
            entries = list(HfApi().list_repo_tree(hub.repo, recursive=True, revision=commit, repo_type=hub.kind))
        below = f"{hub.inside}/" if hub.inside else ""
        files = {entry.path: _stored(entry) for entry in entries if hasattr(entry, "blob_id")}
        inside = {path.removeprefix(below): file for path, file in files.items() if path.startswith(below)}
        return {**inside, "": files[hub.inside]} if hub.inside in files else inside

    def _look(self, name: str) -> StoredFile:
        return self.file(name)  # a commit doesn't change

    def _read_into(
        self, name: str, known: StoredFile, offset_bytes: int, out: memoryview, is_given_up: GivenUp = lambda: False
    ) -> None:
        def fetch() -> None:
            try:
                num_bytes = self._fetch_into(name, known, offset_bytes, out)
            except Exception as error:
                if final := self._final(error, name):
                    raise final from None
                raise
            if num_bytes != len(out):
                raise OSError(f"{num_bytes} of {len(out)} bytes came")

        if out:
            retried(fetch, self.show(name), is_given_up)

    def _final(self, error: Exception, name: str) -> Exception | None:
        from huggingface_hub import errors

        if isinstance(error, errors.EntryNotFoundError | errors.RevisionNotFoundError):
            return DamagedError(f"{self.show(name)} is no longer there at commit {self.commit}", hint="start again")
        return final_error(error, self.hub.repo, self.hub.revision)

    def _fetch_into(self, name: str, known: StoredFile, start: int, out: memoryview) -> int:
        """The bytes, from where the Hub sends us; how many came. Raises DamagedError when they are not of the file we
        know."""
        wanted = {"Range": f"bytes={start}-{start + len(out) - 1}", "Accept-Encoding": "identity"}
        if found := self._links.get(name):
            link, etag = found
            answer = _get(link, wanted)
            if answer.status_code == 206 and answer.headers.get("ETag") == etag:
                return self._content_into(name, known, answer, start, out)
            answer.close()
            self._links.pop(name, None)  # it has run out
        return self._content_into(name, known, self._follow(name, known, wanted), start, out)

    def _follow(self, name: str, known: StoredFile, wanted: Mapping[str, str]) -> Any:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        hub = self.hub
        path = "/".join(part for part in (hub.inside, name) if part)
        url = hf_hub_url(hub.repo, path, repo_type=hub.kind, revision=self.commit)
        for _ in range(_MOST_REDIRECTS):
            is_hub = urlsplit(url)[:2] == urlsplit(constants.ENDPOINT)[:2]
            answer = _get(url, {**build_hf_headers(), **wanted} if is_hub else wanted)
            if is_hub:
                self._check_marks(name, known, answer)
            if not answer.has_redirect_location:
                hf_raise_for_status(answer)
                if not is_hub:
                    self._links[name] = (url, answer.headers.get("ETag"))
                return answer
            answer.close()
            url = urljoin(url, answer.headers["Location"])
        raise NotFoundError(f"{self.show(name)}: the Hub redirects without end")

    def _check_marks(self, name: str, known: StoredFile, answer: Any) -> None:
        """Hold what the Hub says of the file against what its list of files said."""
        marks = {"commit": answer.headers.get("X-Repo-Commit"), "content": answer.headers.get("X-Linked-Etag")}
        # A redirect's own ETag is about the redirect.
        if marks["content"] is None and marks["commit"] is not None and answer.status_code in (200, 206):
            marks["content"] = answer.headers.get("ETag")
        if marks["content"] is not None:
            marks["content"] = marks["content"].removeprefix("W/").strip('"')
        size = answer.headers.get("X-Linked-Size")
        if (
            marks["commit"] not in (None, self.commit)
            or marks["content"] not in (None, known.identity)
            or size not in (None, str(known.num_bytes))
        ):
            answer.close()
            raise self._changed(name)

    def _content_into(self, name: str, known: StoredFile, answer: Any, start: int, out: memoryview) -> int:
        num_bytes = 0
        try:
            if answer.status_code == 206:
                size = answer.headers.get("Content-Range", "").rpartition("/")[2]
                if size not in ("*", str(known.num_bytes)):
                    raise self._changed(name)
                for piece in answer.iter_bytes():
                    if num_bytes + len(piece) <= len(out):
                        out[num_bytes : num_bytes + len(piece)] = piece
                    num_bytes += len(piece)
                return num_bytes
            # The Hub may answer for a small text file with all of it.
            if known.num_bytes > _LONGEST_WHOLE_BYTES:
                raise UnsupportedError(f"{self.show(name)}: the server does not answer with the range asked for")
            whole = bytes(answer.read())
            if len(whole) != known.num_bytes:
                raise OSError(f"{len(whole)} of {known.num_bytes} bytes came")
            out[:] = whole[start : start + len(out)]
            return len(out)
        finally:
            answer.close()

    def _changed(self, name: str) -> DamagedError:
        return DamagedError(f"{self.show(name)} was changed while it was read", hint="start again")


def _get(url: str, headers: Mapping[str, str]) -> Any:
    """The head of an answer, whose body is read or closed by the caller; redirects are not followed."""
    from huggingface_hub import get_session

    session = get_session()
    request = session.build_request("GET", url, headers=dict(headers), timeout=_TIMEOUT_SECONDS)
    return session.send(request, stream=True, follow_redirects=False)


def _stored(entry: Any) -> StoredFile:
    return StoredFile(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, None)
