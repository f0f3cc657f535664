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
from ckptool.formats.host_memory import PinnedSlots
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
    """Pieces that one thread reads, one after another, and what to do when they are there.

    Those that are for a GPU are for one, `device`.
    """

    pieces: list[_Piece] = field(default_factory=list)
    num_bytes: int = 0
    device: torch.device | None = None
    done: list[Callable[[], None]] = field(default_factory=list)


class TensorReads:
    """A context in which tensors are read: all are there at its end. `fill` is called by several threads.

    What `fill` raises is raised here, by `add` or at the end.
    """

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._num_threads = num_threads()
        self._threads = ThreadPoolExecutor(self._num_threads, "tensors")
        self._is_inference = torch.is_inference_mode_enabled()  # which holds for one thread only
        self._of_thread = threading.local()
        self._slots: list[PinnedSlots] = []
        self._batch = _Batch()
        self._running: deque[tuple[_Batch, Future[torch.cuda.Event | None]]] = deque()
        self._being_read = _Regions()

    def __enter__(self) -> TensorReads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._threads.shutdown(cancel_futures=True)
            for slots in self._slots:
                slots.close()

    def add(
        self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor, dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        """Read `box`, a part of the whole tensor that lies in `chunk`, into `target` of its sizes, casting from
        `dtype`; `done` is called by this thread when it is there, in the order of the calls."""
        if not box.num_elements:
            self._batch.done.append(done)
            return
        if self._being_read.overlap(target):
            self.wait()  # a planner may use memory again once a read is done, and of two names for one the last wins
        self._being_read.add(target)
        ready = torch.cuda.current_stream(target.device).record_event() if target.is_cuda else None
        for part in _parts(box, chunk, dtype.itemsize):
            piece = _Piece(fqn, chunk, part, dtype, target[slices(part.local_to(box))], ready)
            is_for_another = target.is_cuda and self._batch.device not in (None, target.device)
            if is_for_another or self._batch.num_bytes + _aligned(piece.num_bytes) > PIECE_BYTES:
                self._submit()
            if target.is_cuda:
                self._batch.device = target.device
            self._batch.pieces.append(piece)
            self._batch.num_bytes += _aligned(piece.num_bytes)
        self._batch.done.append(done)

    def read_alone(
        self, fqn: str, chunk: Chunk, box: Box, target: torch.Tensor, dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        """As `add`, in one piece and while nothing else is read."""
        self.wait()
        self._read_at_once(_Piece(fqn, chunk, box, dtype, target, None))
        done()

    def wait(self) -> None:
        """Return when all is there."""
        self._submit()
        while self._running:
            self._finish_one()
        self._being_read.clear()

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
        with torch.inference_mode(self._is_inference):
            if batch.device is None:
                for piece in batch.pieces:
                    self._read_at_once(piece)
                return None
            with torch.cuda.device(batch.device):
                slots = self._slots_of_thread()
                stream = slots.stream(batch.device)
                with torch.cuda.stream(stream):
                    memory = slots.next_free()
                    start = 0
                    for piece in batch.pieces:
                        if piece.target.is_cuda:
                            self._read_to_gpu(piece, memory[start : start + piece.num_bytes], stream)
                        else:
                            self._read_at_once(piece)
                        start += _aligned(piece.num_bytes)
                    return slots.sent(stream)

    def _read_at_once(self, piece: _Piece) -> None:
        """The whole piece; into memory that isn't pinned, where it can't be read to where it belongs."""
        stored = piece.target if piece.is_direct else torch.empty(piece.box.sizes, dtype=piece.dtype, device="cpu")
        self._fill(piece.fqn, piece.chunk, piece.box, _bytes_of(stored))
        if not piece.is_direct:
            _copy(piece.fqn, stored, piece.target)

    def _read_to_gpu(self, piece: _Piece, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Fill the memory, and begin to copy it. A piece may be too large for it: rows that aren't cut any further."""
        assert piece.ready is not None
        stream.wait_event(piece.ready)
        if memory.nbytes < piece.num_bytes:
            self._read_at_once(piece)
            return
        self._fill(piece.fqn, piece.chunk, piece.box, memoryview(memory.numpy().data))
        stored = memory.view(piece.dtype).view(piece.box.sizes)
        # Cast there: on the host it would take a core, and memory that isn't pinned.
        there = stored if piece.dtype == piece.target.dtype else stored.to(piece.target.device, non_blocking=True)
        _copy(piece.fqn, there, piece.target, non_blocking=True)

    def _slots_of_thread(self) -> PinnedSlots:
        if not hasattr(self._of_thread, "slots"):
            self._of_thread.slots = PinnedSlots(_NUM_SLOTS, PIECE_BYTES)
            self._slots.append(self._of_thread.slots)
        return self._of_thread.slots


class _Regions:
    """Where the targets of reads that aren't done lie: by storage, the bytes from the first to the last."""

    def __init__(self) -> None:
        self._of_storage: dict[int, tuple[int, int, tuple[int, ...] | None]] = {}
        self._starts: set[int] = set()

    def overlap(self, target: torch.Tensor) -> bool:
        """Whether an element of `target` may be one of another target's. Columns of one tensor are told apart."""
        storage, (start, end, strides) = _region(target)
        if start in self._starts:
            return True
        first, last, others = self._of_storage.get(storage, (end, start, None))
        return start < last and first < end and (strides is None or strides != others)

    def add(self, target: torch.Tensor) -> None:
        storage, (start, end, strides) = _region(target)
        first, last, others = self._of_storage.get(storage, (start, end, strides))
        self._of_storage[storage] = min(start, first), max(end, last), strides if strides == others else None
        self._starts.add(start)

    def clear(self) -> None:
        self._of_storage.clear()
        self._starts.clear()


def _region(tensor: torch.Tensor) -> tuple[int, tuple[int, int, tuple[int, ...] | None]]:
    """The address of a tensor's storage, those of its first byte and after its last, and its strides if it has gaps."""
    num_spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    strides = tensor.stride() if num_spanned > tensor.numel() else None
    return tensor.untyped_storage().data_ptr(), (start, start + num_spanned * tensor.itemsize, strides)


def num_threads() -> int:
    """As many as this rank's share of the host's cores; two at least, of which one may wait for a disk."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(2, min(_MAX_THREADS, usable_cores() // max(1, int(ranks) if ranks.isdecimal() else 1)))


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
    # Not reshape(-1): of a single element it can keep a stride, with which there is no view of bytes.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
