"""Memory that other processes can map, by the number of an open file."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile


class SharedMemory:
    """`num_bytes` bytes of zeros, gone with the last process that has them open. `fd` is inheritable.

    Pages come into being when they are first written to. Raises OSError when there is no room.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = _anonymous_file()
        os.ftruncate(self.fd, max(1, num_bytes))
        self.map = mmap.mmap(self.fd, max(1, num_bytes))

    def close(self) -> None:
        """Give it back, as soon as nothing views it any more."""
        with contextlib.suppress(BufferError):
            self.map.close()
        os.close(self.fd)


def attach(fd: int) -> memoryview:
    """The bytes of a SharedMemory of another process, to read."""
    return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckptool")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
