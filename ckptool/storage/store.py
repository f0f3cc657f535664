"""Object stores and servers by fsspec URL: one listing, ranged reads that notice changes, retries with backoff.

Every error of a driver becomes one of ours here, without the credentials that a URL or a driver's message may hold.
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ckptool.errors import (
    AccessError,
    CkptoolError,
    DamagedError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptool.storage.drivers import (
    EXTRAS,
    PART_BYTES,
    SETTINGS,
    attempts_of,
    comes_in_pieces,
    driver_options,
    fetch_into,
    protocols,
    put_options,
    quiet,
)
from ckptool.storage.fetch_ahead import NUM_CONNECTIONS, connections, take
from ckptool.storage.rate_limit import RateLimit

Value = TypeVar("Value")
GivenUp = Callable[[], bool]

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_NUM_ATTEMPTS = 6
_FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 10.0
_LONGEST_ASKED_WAIT_SECONDS = 600.0

#: Longer reads are cut into ranges of this size, which are fetched at the same time.
RANGE_BYTES = 4 << 20

_PIECE_BYTES = 1 << 20

#: What tells one content of a file from another, by the names that drivers give it, the surest first.
_IDENTITY_KEYS = ("ETag", "etag", "generation", "blob_id", "md5", "mtime", "LastModified", "last_modified", "created")
_TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "created")

#: What drivers raise that another attempt doesn't change.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, CkptoolError)


@dataclass(frozen=True)
class StoredFile:
    """A file as a listing found it. `identity` changes when its content does; `modified` is a Unix time in seconds."""

    num_bytes: int
    identity: str
    modified: float | None


class Store:
    """The files below one URL, as one listing found them; read, and written, by name relative to it.

    The name "" is the URL itself, when that is a file. The listing is made on the first question about it.
    """

    def __init__(self, url: str) -> None:
        """Raises UsageError for a protocol that is not known, UnsupportedError when its driver is not installed."""
        if urlsplit(url).query:
            raise UsageError(f"{redact_url(url)}: a signed URL names one file, and a checkpoint has several")
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else url
        self.shown = redact_url(self.url)
        self._opened_by = os.getpid()
        self._opened, self._top = _open_filesystem(self.url, self.shown)
        self._is_sftp = "sftp" in protocols(self._fs)
        self._reads, self._writes = RateLimit(0), RateLimit(0)
        self._lock = threading.Lock()
        self._files: dict[str, StoredFile] | None = None
        #: The names of `_files` in order, once somebody has asked for those below a folder.
        self._names: list[str] | None = None

    def above(self) -> Store:
        """The folder that holds this URL."""
        return type(self)(self.url.rpartition("/")[0])

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        """Another process opens and lists it anew."""
        return type(self), (self.url,)

    @property
    def _fs(self) -> Any:
        """The driver. A forked process opens one of its own: the threads and connections of drivers stay behind."""
        if self._opened_by != os.getpid():
            _left_behind.append(self._opened)
            self._opened, _ = _open_filesystem(self.url, self.shown)
            self._opened_by = os.getpid()
        return self._opened

    @property
    def num_copies(self) -> int:
        """How often a range is in memory while it is fetched."""
        return 1 if comes_in_pieces(self._fs) else 2

    @property
    def files(self) -> Mapping[str, StoredFile]:
        """Every file by its name. A URL with nothing below it has none."""
        with self._lock:
            if self._files is None:
                self._files = self._list()
            return self._files

    def below(self, folder: str) -> Iterator[str]:
        """The names of the files below a folder; "" is all."""
        files, prefix = self.files, f"{folder}/" if folder else ""
        with self._lock:
            if self._names is None:
                self._names = sorted(files)
            names = self._names
        for position in range(bisect.bisect_left(names, prefix), len(names)):
            if not names[position].startswith(prefix):
                return
            if names[position]:
                yield names[position]

    def file(self, name: str) -> StoredFile:
        """Raises NotFoundError."""
        found = self.files.get(name)
        if found is None:
            raise NotFoundError(f"no such file: {self.show(name)}")
        return found

    def show(self, name: str) -> str:
        """A file's URL as it may be shown."""
        return f"{self.shown}/{name}" if name else self.shown

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` of a file on, in ranges fetched side by side.

        Raises DamagedError when the file ends before, or is no longer the one that the listing found.
        """
        known = self.file(name)
        if offset_bytes + len(out) > known.num_bytes:
            raise DamagedError(
                f"{self.show(name)} ends at byte {known.num_bytes}, "
                f"{offset_bytes + len(out) - known.num_bytes} bytes before the data it should hold"
            )

        done = take(self, name, offset_bytes, out)
        starts = range(done, len(out), RANGE_BYTES)

        def fetch(start: int) -> None:
            self._read_into(name, known, offset_bytes + start, out[start : start + RANGE_BYTES])

        if len(starts) < 2:
            for start in starts:
                fetch(start)
        else:
            for _ in connections().map(fetch, starts):
                pass

    def fetch(self, name: str, offset_bytes: int, out: memoryview, is_given_up: Callable[[], bool]) -> None:
        """The same with one request, tried again as long as it is not given up."""
        self._read_into(name, self.file(name), offset_bytes, out, is_given_up)

    def check_writable(self) -> None:
        """Raises UnsupportedError where it is known that nothing can be written."""

    def put(self, name: str, path: Path) -> StoredFile:
        """Upload a local file under a name; what the store then says of it. Raises StorageError or AccessError."""

        def upload() -> StoredFile:
            if self._is_sftp:
                self._fs.put_file(str(path), self._path(name), sent=self._writes.take)
            elif self._writes.bytes_per_s:
                self._put_slowly(name, path)
            else:
                self._fs.put_file(str(path), self._path(name), **put_options(self._fs, path))
            return self._look(name)

        stored = self._retried(name, upload)
        if stored.num_bytes != path.stat().st_size:
            raise StorageError(f"{self.show(name)} has {stored.num_bytes} bytes, {path.stat().st_size} were sent")
        self._note(name, stored)
        return stored

    def put_bytes(self, name: str, content: bytes) -> StoredFile:
        """Upload a small file."""
        from ckptool.storage.scratch import scratch_folder  # which needs this module

        with scratch_folder() as folder:
            path = Path(folder, f"content{PurePosixPath(name).suffix}")
            path.write_bytes(content)
            return self.put(name, path)

    def limit_rate(self, bytes_per_s: float) -> None:
        """From here on read no more than that, and send no more; 0 is no limit."""
        self._reads, self._writes = RateLimit(bytes_per_s), RateLimit(bytes_per_s)

    def _put_slowly(self, name: str, path: Path) -> None:
        with path.open("rb") as source:
            target = self._fs.open(self._path(name), "wb", block_size=PART_BYTES)
            try:
                while piece := source.read(_PIECE_BYTES):
                    self._writes.take(len(piece))
                    target.write(piece)
            except BaseException:
                target.discard()
                target.closed = True  # or its finalizer would send what there is of it
                raise
            target.close()

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._retried(name, remove)
        self._note(name, None)
        if self._is_sftp:
            # Elsewhere there are no empty folders.
            folders = (self._path(str(parent)) for parent in PurePosixPath(name).parents[:-1])
            self._retried(name, lambda: all(self._fs.remove_if_empty(folder) for folder in folders))

    def remove_below(self, folder: str, last: str) -> None:
        """Remove every file below a folder, the one that is called `last` (relative to it) after all others."""
        names = [name for name in self.below(folder) if name != f"{folder}/{last}"]
        with ThreadPoolExecutor(NUM_CONNECTIONS, "remove") as workers:
            for _ in workers.map(self.remove, names):
                pass
        self.remove(f"{folder}/{last}")

    def refresh(self) -> Mapping[str, StoredFile]:
        """List anew."""
        with self._lock:
            self._files, self._names = self._list(), None
            return self._files

    def _note(self, name: str, stored: StoredFile | None) -> None:
        with self._lock:
            if self._files is None:
                return
            self._names = None
            self._files = {key: value for key, value in self._files.items() if key != name}
            if stored is not None:
                self._files[name] = stored

    def _path(self, name: str) -> str:
        return f"{self._top.rstrip('/')}/{name}" if name else self._top

    def _list(self) -> dict[str, StoredFile]:
        def find() -> Mapping[str, Any]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._top, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            # Of a URL that is a file, adlfs gives the name alone.
            return found if isinstance(found, Mapping) else {name: {"type": "file"} for name in found}

        found = self._retried("", find)
        top = self._top.strip("/")
        files: dict[str, StoredFile] = {}
        for path, info in found.items():
            relative = str(path).strip("/").removeprefix(top).strip("/")
            if info.get("type") == "file":
                files[relative] = self._look(relative) if info.get("size") is None else _stored_file(info)
        return files

    def _look(self, name: str) -> StoredFile:
        """What the store says of one file now."""
        self._fs.invalidate_cache()
        return _stored_file(self._fs.info(self._path(name)))

    def _read_into(
        self, name: str, known: StoredFile, offset_bytes: int, out: memoryview, is_given_up: GivenUp = lambda: False
    ) -> None:
        def fetch() -> None:
            self._reads.take(len(out))
            num_bytes, is_checked = fetch_into(self._fs, self._path(name), known.identity, offset_bytes, out)
            if num_bytes != len(out):
                raise OSError(f"{num_bytes} of {len(out)} bytes came")
            if not is_checked:
                self._check_unchanged(name, known)

        try:
            retried(fetch, self.show(name), is_given_up, attempts_of(self._fs, _NUM_ATTEMPTS))
        except StorageError:
            self._check_unchanged(name, known)
            raise

    def _check_unchanged(self, name: str, known: StoredFile) -> None:
        now = self._retried(name, lambda: self._look(name))
        if (now.num_bytes, now.identity) != (known.num_bytes, known.identity):
            raise DamagedError(f"{self.show(name)} was changed while it was read", hint="start again")

    def _retried(self, name: str, attempt: Callable[[], Value]) -> Value:
        return retried(attempt, self.show(name), num_attempts=attempts_of(self._fs, _NUM_ATTEMPTS))


def retried(
    attempt: Callable[[], Value],
    shown: str,
    is_given_up: GivenUp = lambda: False,
    num_attempts: int = 0,
) -> Value:
    """The result of `attempt`, tried again after growing waits, or as long as the server asks; its last error as one of
    ours about `shown`, or CancelledError when nobody wants it any more."""
    num_attempts = num_attempts or _NUM_ATTEMPTS
    for number in range(num_attempts):
        if is_given_up():
            raise CancelledError
        try:
            return attempt()
        except Exception as error:
            if number + 1 == num_attempts or isinstance(error, _FINAL) or _status(error) in (401, 403, 404, 412):
                raise _explain(error, shown, num_attempts) from None
            asked = _asked_wait_seconds(error)
        wait = min(_FIRST_WAIT_SECONDS * 2**number, _LONGEST_WAIT_SECONDS)
        time.sleep(asked + wait * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def redact_url(url: str) -> str:
    """A URL without what may be a secret in it: user and password, the query (a signature), the fragment."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, ("***@" if at else "") + host, parts.path, "***" if parts.query else "", ""))


def shown_name(name: str | os.PathLike[str]) -> str:
    """What a user typed, as it may be shown."""
    text = os.fspath(name)
    return redact_url(text) if is_url(text) else text


#: Drivers that a process before this one opened. Ending them here would say goodbye on connections that are not ours.
_left_behind: list[Any] = []


def _open_filesystem(url: str, shown: str) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0].lower()
    if "::" in url or protocol not in fsspec.available_protocols():
        raise UsageError(
            f"{shown}: {protocol}:// is not a kind of URL that is known", hint="s3, gs, az, hf, sftp, https"
        )
    quiet(protocol)
    try:
        if EXTRAS.get(protocol) == "sftp":
            from ckptool.storage.sftp_files import open_sftp

            return retried(lambda: open_sftp(url), shown)
        return fsspec.core.url_to_fs(url, **driver_options(protocol))
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        hint = f"pip install 'ckptool[{extra}]'" if extra else f"pip install fsspec[{protocol}]"
        raise UnsupportedError(f"{shown}: the driver for {protocol}:// is not installed", hint=hint) from error
    except ValueError as error:
        raise AccessError(
            f"{shown}: this URL and this environment do not say enough to open it ({type(error).__name__})",
            hint=SETTINGS.get(EXTRAS.get(protocol, ""), "check the credentials of this environment"),
        ) from None
    except Exception as error:
        raise _explain(error, shown, 1) from None


def _stored_file(info: Mapping[str, Any]) -> StoredFile:
    size = info.get("size")
    if not isinstance(size, int):
        raise UnsupportedError("the server does not say how large its files are")
    identity = next((info[key] for key in _IDENTITY_KEYS if info.get(key) is not None), "")
    if isinstance(identity, float | datetime.datetime):
        # Of a time, drivers don't give the same digits in a listing and of one file.
        identity = f"{_unix_time(identity):.6f}"
    modified = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), None)
    return StoredFile(size, str(identity), _unix_time(modified))


def _unix_time(value: Any) -> float | None:
    try:
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        return float(value) if isinstance(value, int | float) else datetime.datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None


def _status(error: BaseException) -> int | None:
    """The HTTP status that a driver's error stands for, when it says."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", None) or getattr(error, "code", None) or getattr(response, "status_code", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    cause = error.__cause__
    return found if isinstance(found, int) else _status(cause) if cause is not None else None


def _asked_wait_seconds(error: BaseException) -> float:
    """How long the server asks to be left alone: Retry-After, or the time of its RateLimit header
    (https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/), at most ten minutes."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return _asked_wait_seconds(error.__cause__) if error.__cause__ is not None else 0.0
    named = {str(name).lower(): str(value) for name, value in headers.items()}
    limit = re.search(r"r=0\s*;\s*t=(\d+)", named.get("ratelimit", ""))
    asked = limit[1] if limit else named.get("retry-after", "").strip()
    return min(float(asked), _LONGEST_ASKED_WAIT_SECONDS) if asked.isdigit() else 0.0


def _explain(error: Exception, shown: str, num_attempts: int) -> CkptoolError:
    """One of our errors for a driver's, whose own words may hold URLs and credentials and are not repeated."""
    if isinstance(error, CkptoolError):
        return error
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return NotFoundError(f"no such file or folder: {shown}")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return AccessError(f"access denied: {shown}", hint="check the credentials of this environment")
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"{shown}: this kind of URL can only be read")
    answer = f"HTTP {status}" if status else type(error).__name__
    often = f" {num_attempts} times" if num_attempts > 1 else ""
    return StorageError(f"{shown}: the store failed{often} ({answer})", hint="try again later")
