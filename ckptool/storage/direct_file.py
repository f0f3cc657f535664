"""A new file whose bytes go past the page cache, written behind the caller's back.

Bytes that pass through the page cache cost the kernel a fresh page each, which on many machines is slower than the disk
is; with O_DIRECT (open(2)) the disk fetches them from the buffer itself. Where a filesystem has no O_DIRECT the file is
written the ordinary way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptool.storage import buffers
from ckptool.storage.files import write_at

#: One buffer fills while the other is written. Large enough that a disk's latency doesn't count.
BUFFER_BYTES = 4 << 20

#: Lengths and offsets of direct writes are multiples of this; 4096 suits every disk that Linux knows.
BLOCK_BYTES = 4096

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A file that must not exist yet, written from its start on without seeking, and on the disk once closed.

    Holds two buffers of `buffer_bytes`, a multiple of BLOCK_BYTES. Raises OSError from `write` or `close`, whichever
    comes after the failure.
    """

    def __init__(self, path: Path, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._fd = _create(path)
        self._buffer_bytes = buffer_bytes
        # At the start of a page, since direct writes want addresses that are multiples of a block, too.
        self._buffers = [buffers.take(buffer_bytes) for _ in range(2)]
        self._views = tuple(memoryview(buffer) for buffer in self._buffers)
        self._current = 0
        self._filled = 0
        self._flushed_bytes = 0
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def write(self, data: Any) -> int:
        """Take all of `data`, any object with the buffer interface; its size in bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = min(self._buffer_bytes - self._filled, len(view) - done)
            self._views[self._current][self._filled : self._filled + count] = view[done : done + count]
            self._filled += count
            done += count
            if self._filled == self._buffer_bytes:
                self._hand_over()
        return len(view)

    def tell(self) -> int:
        return self._flushed_bytes + self._filled

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Write the rest, and flush it all to the disk. A second time it does nothing."""
        if self._fd < 0:
            return
        try:
            self._wait()
            whole = self._filled // BLOCK_BYTES * BLOCK_BYTES
            last = self._views[self._current]
            self._write(last[:whole], self._flushed_bytes)
            if whole < self._filled:
                _set_direct(self._fd, False)
                write_at(self._fd, last[whole : self._filled], self._flushed_bytes + whole)
            os.fsync(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without writing the rest."""
        if self._writer is not None:
            self._writer.shutdown()
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        self._views = ()
        while self._buffers:
            buffers.give_back(self._buffers.pop())

    def _hand_over(self) -> None:
        """Let the thread write the full buffer, once it is done with the other one."""
        self._wait()
        self._writer = self._writer or ThreadPoolExecutor(1, "write")
        self._pending = self._writer.submit(self._write, self._views[self._current], self._flushed_bytes)
        self._flushed_bytes += self._buffer_bytes
        self._filled = 0
        self._current = 1 - self._current

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, data: memoryview, offset_bytes: int) -> None:
        try:
            _write_at_once(self._fd, data, offset_bytes)
        except OSError as error:
            # Some filesystems open a file for direct writing and then refuse to do it.
            if error.errno != errno.EINVAL or not _is_direct(self._fd):
                raise
            _set_direct(self._fd, False)
            write_at(self._fd, data, offset_bytes)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | _O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not _O_DIRECT:
            raise
    # Linux makes the file before it finds that the filesystem can't do it.
    return os.open(path, flags & ~os.O_EXCL, 0o666)


def _write_at_once(fd: int, data: memoryview, offset_bytes: int) -> None:
    if not _is_direct(fd):
        write_at(fd, data, offset_bytes)
        return
    done = 0
    while done < len(data) and done % BLOCK_BYTES == 0:
        done += os.pwrite(fd, data[done:], offset_bytes + done)
    if done < len(data):  # cut short inside a block: nearly always a full disk, which the next write says
        _set_direct(fd, False)
        write_at(fd, data[done:], offset_bytes + done)


def _is_direct(fd: int) -> bool:
    return bool(_O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT)


def _set_direct(fd: int, direct: bool) -> None:
    if _O_DIRECT:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if direct else flags & ~_O_DIRECT)
