"""Host memory that a GPU copies from and to at full speed, and that other processes can map."""

from __future__ import annotations

import contextlib
import os
import weakref

import torch

from ckptool.errors import StorageError
from ckptool.storage.shared_memory import SharedMemory


class HostMemory:
    """Shared memory as a tensor of bytes, pinned where there is CUDA. Raises StorageError when CUDA can't pin it.

    It is unpinned when it is closed or nobody has it any more: of memory that was only given back CUDA would go on to
    think that it is pinned, and refuse what comes to lie there next.
    """

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.shared = SharedMemory(num_bytes)
        self.bytes = torch.frombuffer(self.shared.map, dtype=torch.uint8)
        self._unpin = lambda: None
        if pin:
            address = self.bytes.data_ptr()
            code = torch.cuda.cudart().cudaHostRegister(address, self.bytes.nbytes, 0)
            if int(code):
                raise StorageError(f"CUDA can't pin {num_bytes:,} bytes of host memory (error {int(code)})")
            self._unpin = weakref.finalize(self, _unpin, address, os.getpid())

    def close(self) -> None:
        self._unpin()
        del self.bytes
        self.shared.close()


def _unpin(address: int, pid: int) -> None:
    if os.getpid() == pid:  # a process that was forked has no CUDA
        with contextlib.suppress(RuntimeError):  # nor has one that is about to end, or whose GPU has failed
            torch.cuda.cudart().cudaHostUnregister(address)
