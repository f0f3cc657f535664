"""The loop that moves tensor bytes. Nothing else does."""

from __future__ import annotations

import collections
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from ckptool.core.box import Box
from ckptool.core.budget import MemoryBudget
from ckptool.core.interfaces import PartWriter, Progress, Sink, Source, StoreRange
from ckptool.core.parts import FileRecord, Part, PlanItem
from ckptool.core.plan import BATCH_BYTES, PIECES_IN_FLIGHT, item_pieces
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, name_some
from ckptool.formats.casts import check_overflow
from ckptool.planner import group_bytes
from ckptool.storage import buffers
from ckptool.storage.fetch_ahead import LIMIT_BYTES, FetchAhead, room

_ALIGNMENT_BYTES = 64


class _Buffer:
    """Memory for a batch, which only grows."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def views(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        """One after another, each at an address fit for any dtype."""
        starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes_bytes)]
        if self._memory is None or len(self._memory) < starts[-1]:
            self.give_back()
            self._memory = buffers.take(max(starts[-1], BATCH_BYTES))
        whole = memoryview(self._memory)
        return [whole[start : start + size] for start, size in zip(starts, sizes_bytes, strict=False)]

    def give_back(self) -> None:
        if self._memory is not None:
            buffers.give_back(self._memory)
        self._memory = None


def run(
    parts: Sequence[Part],
    source: Source,
    sink: Sink,
    report: Progress | None = None,
    *,
    num_workers: int = 1,
    budget: MemoryBudget | None = None,
    on_done: Callable[[list[FileRecord]], None] | None = None,
) -> list[FileRecord]:
    """Read, convert and write every part, `num_workers` at a time; the records of their files, in order.

    `report(num_bytes)` is called after each written piece, `on_done` with the files of each part that is on the disk.
    Groups of tensors that are converted together, in memory, wait for each other when they don't fit in `budget`. What
    is fetched ahead from a store takes a quarter as much beside them.
    Errors of the source and the sink pass through, the first one; the caller finishes the sink after a normal return.
    """
    budget = budget or MemoryBudget(None)

    def do(part: Part) -> list[FileRecord]:
        records = _run_part(part, source, sink, report, budget)
        if on_done:
            on_done(records)
        return records

    fetched_bytes = budget.total_bytes // 4 if budget.total_bytes else LIMIT_BYTES
    with room(fetched_bytes, num_workers), ThreadPoolExecutor(num_workers, "part") as workers:
        futures = [workers.submit(do, part) for part in parts]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in done:
                    future.result()
        except BaseException:
            budget.cancel()
            for future in futures:
                future.cancel()
            raise
    return [record for future in futures for record in future.result()]


def _run_part(
    part: Part, source: Source, sink: Sink, report: Progress | None, budget: MemoryBudget
) -> list[FileRecord]:
    writer = sink.open(part)
    try:
        for fqn in part.objects:
            writer.write_object(fqn, source.read_object(fqn))
        with FetchAhead(_ranges(part, source)) as ahead:
            for is_plain, items in itertools.groupby(part.items, key=lambda item: item.transform is None):
                if is_plain:
                    _stream(items, source, writer, report, budget, ahead)
                    continue
                for item in items:
                    with budget.reserve(group_bytes(item, source.manifest)):
                        _convert(item, source, writer, report)
                    ahead.passed()
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def _ranges(part: Part, source: Source) -> Iterator[Iterable[StoreRange]]:
    """What each batch or group of a part, in the order in which they are read, wants of a store."""
    for is_plain, items in itertools.groupby(part.items, key=lambda item: item.transform is None):
        if is_plain:
            for batch in _batches(items, source):
                yield [wanted for piece in batch for wanted in source.ranges(piece.source, piece.stored)]
        else:
            for item in items:
                boxes = [(fqn, Box.whole(source.manifest.tensors[fqn].shape)) for fqn in item.sources]
                yield [wanted for fqn, box in boxes for wanted in source.ranges(fqn, box)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part `box` of the stored chunk `chunk` of `entry`: in `source`, the elements of `stored`."""

    entry: TensorEntry
    chunk: Box
    box: Box
    source: str
    stored: Box


def _stream(
    items: Iterable[PlanItem],
    source: Source,
    writer: PartWriter,
    report: Progress | None,
    budget: MemoryBudget,
    ahead: FetchAhead,
) -> None:
    """Copy piece by piece; a thread reads the next pieces while this one writes."""
    ring = [(_Buffer(), _Buffer()) for _ in range(PIECES_IN_FLIGHT)]
    pending: collections.deque[tuple[list[_Piece], Future[list[memoryview]]]] = collections.deque()

    def write_oldest() -> None:
        batch, filled = pending.popleft()
        for piece, data in zip(batch, filled.result(), strict=True):
            budget.check_going_on()
            writer.write(piece.entry.fqn, piece.chunk, piece.box, data)
            if report:
                report(len(data))

    def read(batch: list[_Piece], reading: _Buffer, casting: _Buffer) -> list[memoryview]:
        data = _read_batch(source, batch, reading, casting)
        ahead.passed()
        return data

    with ThreadPoolExecutor(1, "read") as reader:
        try:
            for batch, pair in zip(_batches(items, source), itertools.cycle(ring), strict=False):
                pending.append((batch, reader.submit(read, batch, *pair)))
                if len(pending) == PIECES_IN_FLIGHT:
                    write_oldest()
            while pending:
                write_oldest()
        finally:
            for _, filled in pending:
                filled.cancel()
    for buffer in itertools.chain.from_iterable(ring):
        buffer.give_back()


def _batches(items: Iterable[PlanItem], source: Source) -> Iterator[list[_Piece]]:
    """The pieces in order, small ones together: handing one over to another thread takes as long as copying 100 kB."""
    batch: list[_Piece] = []
    num_bytes = 0
    for item in items:
        entry = item.targets[0]
        for chunk in entry.chunks:
            for box, fqn, stored in item_pieces(item, chunk.box, source.manifest.whole_rows):
                piece_bytes = box.num_elements * max(entry.itemsize_bytes, source.manifest.tensors[fqn].itemsize_bytes)
                if batch and num_bytes + piece_bytes > BATCH_BYTES:
                    yield batch
                    batch, num_bytes = [], 0
                batch.append(_Piece(entry, chunk.box, box, fqn, stored))
                num_bytes += piece_bytes
    if batch:
        yield batch


def _read_batch(source: Source, batch: list[_Piece], reading: _Buffer, casting: _Buffer) -> list[memoryview]:
    """The elements of each piece in its target's dtype, in one of the two buffers."""
    stored = [source.manifest.tensors[piece.source] for piece in batch]
    read = reading.views([piece.box.num_elements * s.itemsize_bytes for piece, s in zip(batch, stored, strict=True)])
    for piece, data in zip(batch, read, strict=True):
        source.read_into(piece.source, piece.stored, data)
    if all(piece.entry.dtype == s.dtype for piece, s in zip(batch, stored, strict=True)):
        return read
    made = casting.views([piece.box.num_elements * piece.entry.itemsize_bytes for piece in batch])
    for piece, one, data, out in zip(batch, stored, read, made, strict=True):
        if len(data):
            before, after = _as_tensor(data, one.dtype), _as_tensor(out, piece.entry.dtype)
            after.copy_(before)
            check_overflow(piece.source, before, after)
    return made


def _convert(item: PlanItem, source: Source, writer: PartWriter, report: Progress | None) -> None:
    """Run a group's transform on whole tensors, and write what it makes."""
    transform = item.transform or dict
    tensors = {fqn: read_whole(source, fqn, item.targets[0].dtype) for fqn in item.sources}
    made = transform(tensors)
    del tensors
    _check_made(item.targets, made)
    for entry in item.targets:
        tensor = made[entry.fqn]
        for chunk in entry.chunks:
            box = chunk.box
            data = _as_memory(tensor[tuple(map(slice, box.offsets, box.ends))].contiguous().view(-1))
            writer.write(entry.fqn, box, box, data)
            if report:
                report(len(data))


def read_whole(source: Source, fqn: str, dtype: str) -> torch.Tensor:
    """One whole tensor, cast to `dtype`."""
    stored = source.manifest.tensors[fqn]
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if tensor.numel():
        source.read_into(fqn, Box.whole(stored.shape), _as_memory(tensor.view(-1)))
    cast = tensor.to(getattr(torch, dtype))
    check_overflow(fqn, tensor, cast)
    return cast


def _check_made(targets: tuple[TensorEntry, ...], made: Mapping[str, torch.Tensor]) -> None:
    """A transform must make exactly what the plan promised. Raises MismatchError otherwise."""
    planned = {entry.fqn: (entry.shape, entry.dtype) for entry in targets}
    found = {fqn: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for fqn, t in made.items()}
    if planned != found:
        wrong = {fqn for fqn in {**planned, **found} if planned.get(fqn) != found.get(fqn)}
        raise MismatchError(f"a transform did not make what was planned: {name_some(wrong)}")


def _as_tensor(data: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype))


def _as_memory(flat: torch.Tensor) -> memoryview:
    """The bytes of a 1-d contiguous CPU tensor, without a copy."""
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)
