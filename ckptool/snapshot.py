"""A copy of a training state at one moment, taken while the GPU computes, from which files are written at leisure.

The copy is in one of two places. On a GPU with room for it: tensors are cloned there, which takes milliseconds, and go
to the host through a ring of shared memory as fast as they are written. Else in shared memory as large as the state,
pinned for CUDA and filled on a stream of its own that waits for the one that computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckptool.core.box import Box
from ckptool.core.tensors import TensorEntry
from ckptool.formats.dcp_writers import Load, Piece
from ckptool.formats.host_memory import HostMemory

#: What goes to a writer at a time, at most.
LOAD_BYTES = 32 << 20

#: Of a ring between a GPU and the writers.
RING_BYTES = 1 << 30

#: Left free on a GPU beside a clone of the state.
MARGIN_BYTES = 2 << 30

_ALIGNMENT = 64
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one tensor: the region `box` of `entry`, in `local`, a contiguous tensor."""

    entry: TensorEntry
    box: Box
    local: torch.Tensor
    is_split: bool

    @classmethod
    def of(cls, fqn: str, value: torch.Tensor) -> Shard:
        shape = tuple(value.shape)
        entry = TensorEntry(fqn, str(value.dtype).removeprefix("torch."), shape, ())
        if not isinstance(value, DTensor):
            return cls(entry, Box.whole(shape), value.detach().contiguous(), False)
        sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        local = value.to_local().detach().contiguous()
        return cls(entry, Box(tuple(offsets), tuple(sizes)), local, True)

    @property
    def num_bytes(self) -> int:
        return self.local.nbytes


@dataclass
class Snapshot:
    """The state of this rank: its region of each tensor, and plain values; `split` are the tensors that are DTensors.

    Tensors are in `memory`, where `starts` says, or clones on the GPU. `stream` is the one on which they travel.
    """

    entries: dict[str, TensorEntry]
    boxes: dict[str, Box]
    split: frozenset[str]
    values: dict[str, Any]
    memory: torch.Tensor
    starts: dict[str, int] = field(default_factory=dict)
    clones: dict[str, torch.Tensor] = field(default_factory=dict)
    stream: torch.cuda.Stream | None = None
    copied: torch.cuda.Event | None = None

    def wait_until_copied(self) -> None:
        """Return when the state may change: nothing of it is still to be read."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def not_split(self, max_bytes: int) -> dict[str, Any]:
        """What all ranks should have alike: plain values, and tensors that are no DTensors, small ones on the CPU."""
        self.wait_until_copied()
        tensors = {fqn: self._tensor(fqn, max_bytes) for fqn in self.entries if fqn not in self.split}
        return {**self.values, **tensors}

    def _tensor(self, fqn: str, max_bytes: int) -> torch.Tensor:
        entry = self.entries[fqn]
        if fqn in self.starts:
            raw = self.memory[self.starts[fqn] : self.starts[fqn] + entry.num_bytes]
            return raw.view(getattr(torch, entry.dtype)).view(entry.shape)
        if entry.num_bytes > max_bytes:
            return self.clones[fqn]
        with torch.cuda.stream(self.stream):  # not the one that computes, which is busy for long
            return self.clones[fqn].cpu()


def state_bytes(shards: Iterable[Shard]) -> int:
    """What the shards take in a HostMemory."""
    return sum(_aligned(shard.num_bytes) for shard in shards)


def fits_on_gpu(num_bytes: int, device: torch.device) -> bool:
    """True when a clone of the state leaves room for the most memory that training has taken so far."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) + num_bytes + others + MARGIN_BYTES <= total


def clone_on_gpu(shards: Sequence[Shard]) -> dict[str, torch.Tensor] | None:
    """Copies of CUDA tensors, in the order of the stream that computes; None when they don't fit after all."""
    clones = {shard.entry.fqn: torch.empty(0) for shard in shards}
    try:
        for shard in shards:
            clones[shard.entry.fqn] = shard.local.clone()
    except torch.OutOfMemoryError:
        clones.clear()
        return None
    return clones


def copy_to_host(shards: Sequence[Shard], memory: HostMemory, stream: torch.cuda.Stream | None) -> dict[str, int]:
    """Put every shard into the memory, one after another; where each begins. On a stream, the copies are only begun."""
    starts: dict[str, int] = {}
    position = 0
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        for shard in shards:
            starts[shard.entry.fqn] = position
            target = memory.bytes[position : position + shard.num_bytes]
            target.copy_(_as_bytes(shard.local), non_blocking=True)
            if stream is not None and shard.local.is_cuda:
                shard.local.record_stream(stream)
            position += _aligned(shard.num_bytes)
    return starts


def pieces_of(entry: TensorEntry, box: Box) -> Iterator[tuple[Box, int, int]]:
    """A chunk cut for writing: (region, first byte within the chunk, number of bytes), in C order."""
    start = 0
    for piece in box.split(max(1, _PIECE_BYTES // entry.itemsize_bytes)):
        num_bytes = piece.num_elements * entry.itemsize_bytes
        yield piece, start, num_bytes
        start += num_bytes


def loads_of(snapshot: Snapshot, fqns: Sequence[str]) -> Iterator[Load]:
    """The content of one file as loads, in order. Of clones, a piece's `start` is within its load."""
    pieces: list[Piece] = []
    filled = 0
    for fqn in fqns:
        for box, first, num_bytes in pieces_of(snapshot.entries[fqn], snapshot.boxes[fqn]):
            if pieces and filled + num_bytes > LOAD_BYTES:
                yield Load(pieces)
                pieces, filled = [], 0
            start = snapshot.starts[fqn] + first if fqn in snapshot.starts else filled
            pieces.append(Piece(fqn, snapshot.boxes[fqn], box, start, num_bytes))
            filled += _aligned(num_bytes)
    if pieces:
        yield Load(pieces)


class Ring:
    """Slots of LOAD_BYTES in pinned memory, through which clones go from the GPU to the writers."""

    def __init__(self, memory: HostMemory, stream: torch.cuda.Stream) -> None:
        self._memory = memory
        self._stream = stream
        self.free = list(range(memory.bytes.nbytes // LOAD_BYTES))

    def fill(self, load: Load, snapshot: Snapshot) -> Load:
        """Copy a load's pieces into a free slot; the load, at its place. Waits for the copy."""
        place = self.free.pop()
        begin = place * LOAD_BYTES
        with torch.cuda.stream(self._stream):
            for piece in load.pieces:
                first = piece.box.local_to(piece.chunk).flat_start(piece.chunk.sizes)
                source = _as_bytes(snapshot.clones[piece.fqn])
                first *= snapshot.entries[piece.fqn].itemsize_bytes
                target = self._memory.bytes[begin + piece.start : begin + piece.start + piece.num_bytes]
                target.copy_(source[first : first + piece.num_bytes], non_blocking=True)
        self._stream.synchronize()
        moved = [Piece(p.fqn, p.chunk, p.box, begin + p.start, p.num_bytes) for p in load.pieces]
        return Load(moved, place)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
