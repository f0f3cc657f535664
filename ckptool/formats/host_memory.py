"""Host memory that a GPU copies from and to at full speed, and that other processes can map."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from dataclasses import dataclass

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
            code = self._register()
            if code:
                self.close()
                _forget_error()
                raise StorageError(f"CUDA can't pin {num_bytes:,} bytes of host memory (error {code})")
            self._unpin = weakref.finalize(self, _unpin, self.bytes.data_ptr(), os.getpid())

    def _register(self) -> int:
        """CUDA's error, or 0."""
        return int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))

    def close(self) -> None:
        self._unpin()
        del self.bytes
        self.shared.close()


def _unpin(address: int, pid: int) -> None:
    if os.getpid() == pid:  # a process that was forked has no CUDA
        with contextlib.suppress(RuntimeError):  # nor has one that is about to end, or whose GPU has failed
            torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """CUDA remembers the last error, and the next kernel, whoever starts it, is blamed for it. This is that kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@dataclass
class _Slot:
    memory: torch.Tensor
    passed: torch.cuda.Event | None = None


class PinnedSlots:
    """Memory of one thread for what goes to GPUs, in slots that are filled in turn while others are on their way.

    Where it can't be pinned, CUDA copies it to memory of its own first, and is slower.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        try:
            self._memory = HostMemory(num_slots * slot_bytes, pin=True)
        except StorageError:
            self._memory = HostMemory(num_slots * slot_bytes, pin=False)
        self._slots = deque(_Slot(memory) for memory in self._memory.bytes.split(slot_bytes))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one on which this thread's copies to a GPU are made."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def next_free(self) -> torch.Tensor:
        """The slot that was sent the longest ago, once that has arrived."""
        self._slots.rotate()
        if (passed := self._slots[0].passed) is not None:
            passed.synchronize()
        return self._slots[0].memory

    def sent(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """All copies from the slot are begun, on this stream; an event that is over when they have arrived."""
        self._slots[0].passed = passed = stream.record_event()
        return passed

    def close(self) -> None:
        """Wait for what is on its way, and give the memory back."""
        try:
            for stream in self._streams.values():
                stream.synchronize()
        finally:
            self._slots.clear()
            self._memory.close()
