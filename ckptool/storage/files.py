"""Reading and writing local files with errors a person can act on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ckptool.core.interfaces import StoreRange
from ckptool.errors import AccessError, CkptoolError, DamagedError, NotFoundError, StorageError, UnsafeError
from ckptool.storage.store_path import StorePath

#: Where checkpoints lie: on a local filesystem, or in a store. Functions that take a Place only look or read.
Place = Path | StorePath
AnyPlace = TypeVar("AnyPlace", Path, StorePath, Place)
Value = TypeVar("Value")

#: Far more than the largest sidecar takes. Parsed, it is up to thirty times as large.
MAX_JSON_BYTES = 64 << 20

_STALE_WAITS_SECONDS = (0.1, 0.5, 2.0)
_MAX_NAME_LENGTH = 4096
_MAX_PART_BYTES = 255


def explain_os_error(error: OSError, path: Place | str) -> CkptoolError:
    """The ckptool error that says what an OSError means for the person at the keyboard."""
    if error.filename2 is not None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        path = os.fsdecode(error.filename2)  # of a copy, what is written
    if error.errno == errno.ENOSPC:
        return StorageError(f"no space left on the disk of {path}", hint="free some space, or choose another folder")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"permission denied: {path}")
    if error.errno == errno.EROFS:
        return StorageError(f"read-only file system: {path}")
    if error.errno == errno.ENOENT:
        return NotFoundError(f"no such file or folder: {path}")
    return StorageError(f"{path}: {error.strerror or error}")


@contextlib.contextmanager
def os_errors(path: Place | str) -> Iterator[None]:
    """Turn OSErrors about `path` into ckptool errors."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, error.filename or path) from error


def fresh_handle(attempt: Callable[[], Value]) -> Value:
    """The result of `attempt`, which opens what it reads; tried again when a file server says that a handle is stale,
    as NFS does of a file that was replaced, or after the server has started anew."""
    for wait_seconds in _STALE_WAITS_SECONDS:
        try:
            return attempt()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(wait_seconds)
    return attempt()


class _OpenFiles:
    """The descriptors of one thread, by name. Closed when nobody has them any more: when the thread ends."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.popitem()[1])

    def __del__(self) -> None:
        self.close()


class RangeReader:
    """Positional reads of the files below one folder; each thread keeps at most `max_open` of them open.

    Names come from checkpoints, so they are untrusted: `path_of` refuses any that leaves the folder.
    """

    def __init__(self, root: Path, max_open: int = 64) -> None:
        self.root: Place = root
        self._folder = root
        self.max_open = max_open
        self._of_thread = threading.local()
        self._all_open: weakref.WeakSet[_OpenFiles] = weakref.WeakSet()

    def path_of(self, name: str) -> Place:
        """The path of a file inside the folder. Raises UnsafeError for names that point outside."""
        return safe_join(self.root, name)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on. Raises DamagedError when the file ends before."""
        done = 0

        def fill() -> None:
            nonlocal done
            fd = self._open(name)
            try:
                while done < len(out):
                    count = os.preadv(fd, [out[done:]], offset_bytes + done)
                    if count == 0:
                        raise DamagedError(
                            f"{self.root / name} ends at byte {offset_bytes + done}, "
                            f"{len(out) - done} bytes before the data it should hold"
                        )
                    done += count
            except OSError:
                os.close(self._of_thread.open.fds.pop(name))
                raise

        with os_errors(self.root / name):
            fresh_handle(fill)

    def read(self, name: str, offset_bytes: int, num_bytes: int) -> bytes:
        out = bytearray(num_bytes)
        self.read_into(name, offset_bytes, memoryview(out))
        return bytes(out)

    def ranges(self, name: str, offset_bytes: int, num_bytes: int) -> tuple[StoreRange, ...]:
        """What a read of so many bytes will have to ask a store for; nothing, of a local folder."""
        return ()

    def close(self) -> None:
        """No thread may be reading any more."""
        for opened in self._all_open:
            opened.close()

    def _open(self, name: str) -> int:
        if not hasattr(self._of_thread, "open"):
            self._of_thread.open = _OpenFiles()
            self._all_open.add(self._of_thread.open)
        fds: dict[str, int] = self._of_thread.open.fds
        if name not in fds:
            if len(fds) >= self.max_open:
                os.close(fds.pop(next(iter(fds))))
            fds[name] = open_regular(safe_join(self._folder, name))
        return fds[name]


def open_regular(path: Path) -> int:
    """A descriptor to read a file with. Raises UnsafeError for a pipe or a device, which could block or never end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeError(f"{path} is not a regular file")
    if hasattr(os, "posix_fadvise"):
        # Most reads here go from front to back; with this advice a cold disk gives twice the bytes a second.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def safe_join(root: AnyPlace, name: str) -> AnyPlace:
    """`root / name` for an untrusted relative name.

    Raises UnsafeError for absolute names, `..`, backslashes, names that no file can have, and links that lead out of
    `root` (the Hub cache's links into its own blob stores are allowed).
    """
    parts = name.split("/")
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in parts or not any(parts):
        raise UnsafeError(f"{root}: a file name points outside its folder: {name[:200]!r}")
    if len(name) > _MAX_NAME_LENGTH or not all(_can_be_a_name(part) for part in parts):
        raise UnsafeError(f"{root}: no file can have this name: {name[:200]!r}")
    path = root / name
    if (
        isinstance(path, Path)
        and isinstance(root, Path)
        and _is_linked(path, len(parts))
        and not _stays_inside(path, root)
    ):
        raise UnsafeError(f"{path} is a link out of its folder")
    return path


def _is_linked(path: Path, num_parts: int) -> bool:
    return any(link.is_symlink() for link in [path, *path.parents[: num_parts - 1]])


def _can_be_a_name(part: str) -> bool:
    try:
        return len(os.fsencode(part)) <= _MAX_PART_BYTES
    except UnicodeEncodeError:
        return False


def _stays_inside(path: Path, root: Path) -> bool:
    try:
        target, base = path.resolve(), root.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return target.is_relative_to(base) or (base.parent.name == "snapshots" and _is_in_hub_cache(target, base))


def _is_in_hub_cache(target: Path, snapshot: Path) -> bool:
    """Where a snapshot's files are: in the folder of its repository or, when they came by hf-xet, in a folder that the
    repositories share (huggingface_hub/utils/_shared_blobs.py)."""
    repository = snapshot.parent.parent
    if target.is_relative_to(repository):
        return True
    shared = repository.parent / "blobs"
    return (
        target.parent.parent == shared
        and target.parent.name == target.name[:2]
        and re.fullmatch(r"[0-9a-f]{64}", target.name) is not None
        and repository.name.startswith("models--")
        and (shared / ".huggingface-shared-blobs").is_file()
    )


def open_binary(path: Place, *, in_order: bool = False) -> BinaryIO:
    """A file to read; `in_order`: from front to back, in pieces that need no buffer.

    Raises UnsafeError for a pipe or a device, NotFoundError for what is not in a store.
    """
    if isinstance(path, StorePath):
        return path.open_binary(in_order)
    return open(open_regular(path), "rb", buffering=0 if in_order else -1)


def read_bytes(path: Place, max_bytes: int) -> bytes:
    """A small file's content. Raises DamagedError when it is larger than that, UnsafeError for a pipe or a device."""

    def read() -> bytes:
        with open_binary(path) as file:
            return file.read(max_bytes + 1)

    with os_errors(path):
        raw = fresh_handle(read)
    if len(raw) > max_bytes:
        raise DamagedError(f"{path} is larger than {max_bytes} bytes")
    return raw


def read_json(path: Place, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file. Raises DamagedError when it is larger than `max_bytes`, not JSON, or nested absurdly deep, and
    UnsafeError when it is no regular file."""
    try:
        return json.loads(read_bytes(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not valid JSON: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON with a final newline. Durability is the staging folder's business."""
    with os_errors(path):
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


#: Some kernels take several times as long for larger writes (benchmarks/results/write-size.md), so they are cut.
WRITE_PIECE_BYTES = 1 << 20


def pieces(data: memoryview) -> Iterator[memoryview]:
    """The bytes in pieces of the size that the kernel writes fastest."""
    for start in range(0, len(data), WRITE_PIECE_BYTES):
        yield data[start : start + WRITE_PIECE_BYTES]


def write_at(fd: int, data: memoryview, offset_bytes: int) -> None:
    """Write all of `data` at a place of a file. Raises OSError as the kernel does."""
    for piece in pieces(data):
        done = 0
        while done < len(piece):
            done += os.pwrite(fd, piece[done:], offset_bytes + done)
        offset_bytes += len(piece)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
