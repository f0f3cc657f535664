"""What a user typed, a local path or a URL, and what differs between the two while reading."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckptool.core.interfaces import StoreRange
from ckptool.errors import UnsupportedError, UsageError
from ckptool.storage.fetch_ahead import RANGE_BYTES, FetchAhead, take
from ckptool.storage.files import Place, RangeReader, open_binary, os_errors, safe_join
from ckptool.storage.hub_store import HubStore, parse_hub_url
from ckptool.storage.scratch import scratch_folder
from ckptool.storage.store import Store, is_url
from ckptool.storage.store_path import StorePath

#: Reads of a store up to half this size bring a whole block, since descriptions are read in many small pieces.
_BLOCK_BYTES = 128 << 10
_COPY_BYTES = 8 << 20


def place(text: str | Place) -> Place:
    """What a user typed: a URL, or a local path (also as file://). Raises UsageError or UnsupportedError."""
    if not isinstance(text, str):
        return text
    if not text:  # which pathlib takes for the folder where one works
        raise UsageError("a name is empty", hint="is a variable of the script not set?")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if not is_url(text):
        return Path(text).expanduser()
    return StorePath(HubStore(text) if parse_hub_url(text) else Store(text))


def local_path(path: Place, what: str) -> Path:
    """Raises UnsupportedError for a URL; `what` says what can't be done there."""
    if isinstance(path, StorePath):
        raise UnsupportedError(f"{path}: {what} works on local folders only", hint="ckptool copy brings it here")
    return path


def inside(folder: Place, name: str) -> Place:
    """A checkpoint below a root. In a store it gets a listing of its own, which is shorter than the root's."""
    return folder / name if isinstance(folder, Path) else place((folder / name).url)


def range_reader(root: Place) -> RangeReader:
    """Positional reads of the files below a folder."""
    return RangeReader(root) if isinstance(root, Path) else StoreReader(root)


def files_below(folder: Place) -> Iterator[str]:
    """Every file below `folder`, as sorted relative names; hidden files and folders are left out."""
    if isinstance(folder, Path):
        for parent, folders, files in os.walk(folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            relative = Path(parent).relative_to(folder)
            yield from ((relative / name).as_posix() for name in sorted(files) if not name.startswith("."))
    else:
        names = sorted(folder.names_below(), key=lambda name: (name.rpartition("/")[0], name))
        yield from (name for name in names if not any(part.startswith(".") for part in name.split("/")))


def file_version(path: Place) -> tuple[Any, ...]:
    """Differs when a file has other content: its size, and its time of change or the store's mark of its content."""
    if isinstance(path, Path):
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    found = path.store.file(path.key)
    return found.num_bytes, found.identity


def fetched(folder: Place, names: Iterable[str]) -> Path:
    """A local folder with these files of `folder`: itself, or, of a store, copies that go when the program ends."""
    if isinstance(folder, Path):
        return folder
    scratch = scratch_folder()
    _scratch_folders.append(scratch)
    top = Path(scratch.name, folder.name or "files")
    top.mkdir()
    names, reader = list(names), StoreReader(folder)
    sizes = [(folder / name).stat().st_size for name in names]
    # Longer files see to it themselves.
    small = (name if num_bytes <= RANGE_BYTES else "" for name, num_bytes in zip(names, sizes, strict=True))
    with FetchAhead(reader.ranges(name, 0, RANGE_BYTES) if name else () for name in small) as ahead:
        for name in names:
            target = safe_join(top, name)
            with os_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with open_binary(folder / name, in_order=True) as stream, target.open("wb") as file:
                    while piece := stream.read(_COPY_BYTES):
                        file.write(piece)
            ahead.passed()
    return top


#: Removed by their finalizers when the interpreter ends.
_scratch_folders: list[tempfile.TemporaryDirectory[str]] = []


class StoreReader(RangeReader):
    """Positional reads of the files below a folder of a store."""

    def __init__(self, root: StorePath) -> None:
        self.root = root
        self._top = root
        self._block = threading.local()

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Raises DamagedError when the file ends before, or has changed since the listing."""
        path = safe_join(self._top, name)
        if take(path.store, path.key, offset_bytes, out) == len(out):
            return
        if len(out) > _BLOCK_BYTES // 2:
            path.store.read_into(path.key, offset_bytes, out)
            return
        file, start, block = getattr(self._block, "kept", ("", 0, b""))
        if file != path.key or not start <= offset_bytes <= offset_bytes + len(out) <= start + len(block):
            size = max(len(out), min(_BLOCK_BYTES, path.stat().st_size - offset_bytes))
            buffer = bytearray(size)
            path.store.read_into(path.key, offset_bytes, memoryview(buffer))
            start, block = offset_bytes, bytes(buffer)
            self._block.kept = (path.key, start, block)
        out[:] = block[offset_bytes - start : offset_bytes - start + len(out)]

    def ranges(self, name: str, offset_bytes: int, num_bytes: int) -> tuple[StoreRange, ...]:
        found = self._top.store.files.get((self._top / name).key)
        end = min(offset_bytes + num_bytes, found.num_bytes if found else 0)
        return (StoreRange(self._top.store, (self._top / name).key, offset_bytes, end),) if offset_bytes < end else ()

    def close(self) -> None:
        """Nothing is held open."""
