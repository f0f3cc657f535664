"""Boxes of stored chunks read into tensors, on the CPU or on a GPU, by several threads.

A tensor in the CPU's memory is read into where it lies. Bytes for a GPU go through pinned memory, a piece at a time: a
thread reads the next piece while its last one is on the way. (Whole tensors, read into fresh memory and copied from
there, come at a small part of the bus's speed.)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import torch

from ckptool.core.box import Box
from ckptool.core.tensors import Chunk
from ckptool.formats.casts import check_overflow
from ckptool.formats.dcp_source import slices
from ckptool.formats.host_memory import HostMemory
from ckptool.planner import usable_cores

#: What a thread reads and copies at a time.
PIECE_BYTES = 16 << 20

#: More threads of one process gain nothing: together they fill the bus to a GPU.
_MAX_THREADS = 8

#: Pieces of a thread: one is read while another is on its way.
_NUM_SLOTS = 2

_ALIGNMENT = 64

#: (fqn, chunk, box in the whole tensor, where its elements go).
Fill = Callable[[str, Chunk, Box, memoryview], None]


@dataclass(frozen=True)
class _Piece:
    """Some rows of a box in a chunk, and the part of a tensor that they are for. `ready`: it may be written to."""

    fqn: str
    chunk: Chunk
    box: Box
    dtype: torch.dtype
    target: torch.Tensor
    ready: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        return self.target.is_cpu and self.target.dtype == self.dtype and self.target.is_contiguous()


@dataclass
class _Batch:
    """Pieces that one thread reads, one after another, and what to do when they are there."""

    pieces: list[_Piece] = field(default_factory=list)
    num_bytes: int = 0
    done: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _Slot:
    """Room for a batch in pinned memory; free when the copy from it has `passed`."""

    memory: torch.Tensor
    passed: torch.cuda.Event


class TensorReads:
    """A context in which tensors are read: all are there at its end. `fill` is called by several threads.

    What `fill` raises is raised here, by `add` or at the end. With `in_order`, for stores, one batch is read at a time.
    """

    def __init__(self, fill: Fill, in_order: bool = False) -> None:
        self._fill = fill
        self._num_threads = 1 if in_order else num_threads()
        self._threads = ThreadPoolExecutor(self._num_threads, "tensors")
        self._slots = threading.local()
        self._slots_lock = threading.Lock()
        self._memory: HostMemory | None = None
        self._num_slots = 0
        self._batch = _Batch()
        self._running: deque[tuple[_Batch, Future[torch.cuda.Event | None]]] = deque()

    def __enter__(self) -> TensorReads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._threads.shutdown(cancel_futures=True)
            if self._memory is not None:
                torch.cuda.synchronize()
                self._slots = threading.local()
                self._memory.close()

    def add(
        self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor, dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        """Read `box`, a part of the whole tensor that lies in `chunk`, into `target` of its sizes, casting from
        `dtype`; `done` is called by this thread when it is there."""
        ready = torch.cuda.current_stream(target.device).record_event() if target.is_cuda else None
        for part in _parts(box, chunk, dtype.itemsize):
            piece = _Piece(fqn, chunk, part, dtype, target[slices(part.local_to(box))], ready)
            if self._batch.num_bytes + _aligned(piece.num_bytes) > PIECE_BYTES:
                self._submit()
            self._batch.pieces.append(piece)
            self._batch.num_bytes += _aligned(piece.num_bytes)
        self._batch.done.append(done)

    def read_alone(
        self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor, dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        """As `add`, in one piece and while nothing else is read."""
        self.wait()
        stored = torch.empty(box.sizes, dtype=dtype)
        self._fill(fqn, chunk, box, _bytes_of(stored))
        _copy(fqn, stored, target)
        done()

    def wait(self) -> None:
        """Return when all is there."""
        self._submit()
        while self._running:
            self._finish_one()

    def _submit(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if not batch.pieces and not batch.done:
            return
        self._running.append((batch, self._threads.submit(self._read, batch)))
        while len(self._running) > _NUM_SLOTS * self._num_threads:
            self._finish_one()

    def _finish_one(self) -> None:
        batch, read = self._running.popleft()
        copied = read.result()
        if copied is not None:
            copied.synchronize()
        for done in batch.done:
            done()

    def _read(self, batch: _Batch) -> torch.cuda.Event | None:
        """A thread's work; an event that is over when a GPU has everything."""
        device = next((piece.target.device for piece in batch.pieces if piece.target.is_cuda), None)
        if device is None:
            for piece in batch.pieces:
                self._read_on_cpu(piece)
            return None
        with torch.cuda.device(device):
            slot = self._free_slot(device)
            with torch.cuda.stream(self._slots.stream):
                start = 0
                for piece in batch.pieces:
                    if piece.target.is_cuda:
                        self._read_to_gpu(piece, slot.memory[start : start + piece.num_bytes])
                    else:
                        self._read_on_cpu(piece)
                    start += _aligned(piece.num_bytes)
                slot.passed.record()
        return slot.passed

    def _read_on_cpu(self, piece: _Piece) -> None:
        stored = piece.target if piece.is_direct else torch.empty(piece.box.sizes, dtype=piece.dtype)
        self._fill(piece.fqn, piece.chunk, piece.box, _bytes_of(stored))
        if not piece.is_direct:
            _copy(piece.fqn, stored, piece.target)

    def _read_to_gpu(self, piece: _Piece, memory: torch.Tensor) -> None:
        """Fill the memory, and begin to copy it. A piece may be too large for it: rows that aren't cut any further."""
        is_pinned = memory.nbytes == piece.num_bytes
        raw = memory if is_pinned else torch.empty(piece.num_bytes, dtype=torch.uint8)
        self._fill(piece.fqn, piece.chunk, piece.box, memoryview(raw.numpy().data))
        self._slots.stream.wait_event(piece.ready)
        stored = raw.view(piece.dtype).view(piece.box.sizes)
        # Cast there: on the host it would take a core, and memory that isn't pinned.
        there = stored if piece.dtype == piece.target.dtype else stored.to(piece.target.device, non_blocking=is_pinned)
        _copy(piece.fqn, there, piece.target, non_blocking=is_pinned)

    def _free_slot(self, device: torch.device) -> _Slot:
        """This thread's slot whose content is the longest on its way, once it has arrived."""
        if not hasattr(self._slots, "all"):
            self._slots.stream = torch.cuda.Stream(device)
            self._slots.all = deque(_Slot(memory, torch.cuda.Event()) for memory in self._pinned())
        slots: deque[_Slot] = self._slots.all
        slots.rotate()
        slots[0].passed.synchronize()
        return slots[0]

    def _pinned(self) -> list[torch.Tensor]:
        """The next thread's part of the pinned memory."""
        with self._slots_lock:
            if self._memory is None:
                self._memory = HostMemory(self._num_threads * _NUM_SLOTS * PIECE_BYTES, pin=True)
            first, self._num_slots = self._num_slots, self._num_slots + _NUM_SLOTS
        return [self._memory.bytes[i * PIECE_BYTES :][:PIECE_BYTES] for i in range(first, first + _NUM_SLOTS)]


def num_threads() -> int:
    """As many as this rank's share of the host's cores; two at least, of which one may wait for a disk."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(2, min(_MAX_THREADS, usable_cores() // max(1, int(ranks) if ranks.isdigit() else 1)))


def _parts(box: Box, chunk: Chunk, itemsize_bytes: int) -> list[Box]:
    """The box in pieces of at most PIECE_BYTES, or where the chunk doesn't hold it in one run, in rows."""
    max_elements = max(1, PIECE_BYTES // itemsize_bytes)
    if box.num_elements <= max_elements:
        return [box]
    if box.local_to(chunk.box).is_contiguous_in(chunk.box.sizes):
        return list(box.split(max_elements))
    return list(box.split_rows(max(1, max_elements * box.sizes[0] // box.num_elements)))


def _copy(fqn: str, stored: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> None:
    target.copy_(stored, non_blocking=non_blocking)
    check_overflow(fqn, stored, target, hint="bfloat16 has the range of float32")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
