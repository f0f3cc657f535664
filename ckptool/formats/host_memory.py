"""Host memory that a GPU copies from and to at full speed, and that other processes can map."""

from __future__ import annotations

import torch

from ckptool.errors import StorageError
from ckptool.storage.shared_memory import SharedMemory


class HostMemory:
    """Shared memory as a tensor of bytes, pinned where there is CUDA. Raises StorageError when CUDA can't pin it."""

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.shared = SharedMemory(num_bytes)
        self.bytes = torch.frombuffer(self.shared.map, dtype=torch.uint8)
        self._is_pinned = False
        if pin:
            code = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
            if int(code):
                raise StorageError(f"CUDA can't pin {num_bytes:,} bytes of host memory (error {int(code)})")
            self._is_pinned = True

    def close(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        del self.bytes
        self.shared.close()
