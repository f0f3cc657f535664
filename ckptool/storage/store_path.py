"""A file or folder of a store, with the methods of pathlib.Path that only look."""

from __future__ import annotations

import fnmatch
import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ckptool.core.interfaces import StoreRange
from ckptool.storage.fetch_ahead import RANGE_BYTES, FetchAhead, slices
from ckptool.storage.store import Store

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileStat:
    """What `StorePath.stat` tells, under the names of os.stat_result. Folders have 0 bytes."""

    st_size: int
    st_mtime: float


@functools.total_ordering
class StorePath:
    """A file or folder in a store, with those methods of pathlib.Path that only look.

    It answers from its store's one listing. Not a Path, and without `__fspath__`: what would reach for the local disk
    fails instead. `str` gives the URL without credentials.
    """

    def __init__(self, store: Store, key: str = "") -> None:
        self.store = store
        self.key = key

    @property
    def name(self) -> str:
        return PurePosixPath(self.key or self.store.shown.partition("?")[0]).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> StorePath:
        if self.key:
            return StorePath(self.store, self.key.rpartition("/")[0])
        return StorePath(self.store.above())

    @property
    def parents(self) -> Sequence[StorePath]:
        """The folders above, up to the store's own."""
        parts = self.key.split("/") if self.key else []
        return [StorePath(self.store, "/".join(parts[:end])) for end in range(len(parts) - 1, -1, -1)]

    def __truediv__(self, name: str | PurePosixPath) -> StorePath:
        return StorePath(self.store, "/".join(part for part in (self.key, str(name).strip("/")) if part))

    def __str__(self) -> str:
        return self.store.show(self.key)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self.url == other.url

    def __lt__(self, other: StorePath) -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def url(self) -> str:
        """The whole URL, credentials and all: not for people."""
        return "/".join(part for part in (self.store.url.rstrip("/"), self.key) if part)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self.key in self.store.files

    def is_dir(self) -> bool:
        """Stores have no empty folders."""
        return any(self._below())

    def is_symlink(self) -> bool:
        return False

    def resolve(self) -> StorePath:
        return self

    def absolute(self) -> StorePath:
        return self

    def is_relative_to(self, other: StorePath) -> bool:
        return f"{self.url}/".startswith(f"{other.url}/")

    def stat(self) -> FileStat:
        """Raises NotFoundError."""
        if not self.is_file() and (below := list(self._below())):
            return FileStat(0, max(self.store.file(key).modified or 0.0 for key in below))
        found = self.store.file(self.key)
        return FileStat(found.num_bytes, found.modified or 0.0)

    def open_binary(self, in_order: bool) -> io.BufferedReader:
        """The file to read; of one that is read in order, more is fetched meanwhile. Raises NotFoundError."""
        num_bytes = self.store.file(self.key).num_bytes
        if not in_order or num_bytes <= RANGE_BYTES:
            buffer_bytes = min(max(1, num_bytes), RANGE_BYTES) if in_order else _BUFFER_BYTES
            return io.BufferedReader(_StoreStream(self.store, self.key), buffer_bytes)
        return io.BufferedReader(_StreamAhead(self.store, self.key), _BUFFER_BYTES)

    def names_below(self) -> Iterator[str]:
        """The names of all files below, relative to here."""
        return (key[len(self.key) :].lstrip("/") for key in self._below())

    def iterdir(self) -> Iterator[StorePath]:
        yield from (self / name for name in sorted({key.partition("/")[0] for key in self.names_below()}))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Of the names directly in this folder only."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """Files only."""
        found = (self / name for name in sorted(self.names_below()))
        return (path for path in found if fnmatch.fnmatchcase(path.name, pattern))

    def _below(self) -> Iterator[str]:
        return self.store.below(self.key)


class _StoreStream(io.RawIOBase):
    """A file of a store, read from front to back, or with seeks."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._num_bytes = store.file(key).num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._num_bytes - self._position))
        self._store.read_into(self._key, self._position, memoryview(buffer).cast("B")[:count])
        self._position += count
        return count


class _StreamAhead(_StoreStream):
    """The same, for who reads from front to back."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store, key)
        self._ahead = FetchAhead(slices([StoreRange(store, key, 0, self._num_bytes)]))
        self._ahead.start()

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._ahead.passed(self._position // RANGE_BYTES)
        return count

    def close(self) -> None:
        self._ahead.close()
        super().close()
