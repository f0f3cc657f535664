"""The loop that moves tensor bytes. Nothing else does."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch

from ckptool.core.box import Box
from ckptool.core.budget import MemoryBudget
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.interfaces import PartWriter, Progress, Sink, Source
from ckptool.core.parts import FileRecord, Part, PlanItem
from ckptool.core.plan import PIECES_IN_FLIGHT, item_pieces
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, name_some
from ckptool.planner import group_bytes


class _Buffer:
    """A staging buffer that only grows: first touch of fresh pages costs ten times a copy into warm ones."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def view(self, num_bytes: int) -> memoryview:
        if len(self._bytes) < num_bytes:
            self._bytes = bytearray(num_bytes)
        return memoryview(self._bytes)[:num_bytes]


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
    Groups of tensors that are converted together, in memory, wait for each other when they don't fit in `budget`.
    Errors of the source and the sink pass through, the first one; the caller finishes the sink after a normal return.
    """
    budget = budget or MemoryBudget(None)

    def do(part: Part) -> list[FileRecord]:
        records = _run_part(part, source, sink, report, budget)
        if on_done:
            on_done(records)
        return records

    with ThreadPoolExecutor(num_workers, "part") as workers:
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
        for is_plain, items in itertools.groupby(part.items, key=lambda item: item.transform is None):
            if is_plain:
                _stream(items, source, writer, report, budget)
            else:
                for item in items:
                    with budget.reserve(group_bytes(item, source.manifest)):
                        _convert(item, source, writer, report)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def _stream(
    items: Iterable[PlanItem], source: Source, writer: PartWriter, report: Progress | None, budget: MemoryBudget
) -> None:
    """Copy piece by piece; a thread reads the next pieces while this one writes."""
    ring = itertools.cycle([(_Buffer(), _Buffer()) for _ in range(PIECES_IN_FLIGHT)])
    work = (
        (item.targets[0], chunk.box, *piece)
        for item in items
        for chunk in item.targets[0].chunks
        for piece in item_pieces(item, chunk.box, source.manifest.whole_rows)
    )
    pending: collections.deque[tuple[TensorEntry, Box, Box, Future[memoryview]]] = collections.deque()

    def write_oldest() -> None:
        entry, chunk, piece, filled = pending.popleft()
        data = filled.result()
        budget.check_going_on()
        writer.write(entry.fqn, chunk, piece, data)
        if report:
            report(len(data))

    with ThreadPoolExecutor(1, "read") as reader:
        try:
            for (entry, chunk, piece, fqn, stored), buffers in zip(work, ring, strict=False):
                filled = reader.submit(_read_piece, source, fqn, stored, entry.dtype, *buffers)
                pending.append((entry, chunk, piece, filled))
                if len(pending) == PIECES_IN_FLIGHT:
                    write_oldest()
            while pending:
                write_oldest()
        finally:
            for *_, filled in pending:
                filled.cancel()


def _read_piece(source: Source, fqn: str, box: Box, dtype: str, reading: _Buffer, casting: _Buffer) -> memoryview:
    """A box's elements as `dtype`, in one of the two buffers."""
    stored = source.manifest.tensors[fqn]
    data = reading.view(box.num_elements * stored.itemsize_bytes)
    source.read_into(fqn, box, data)
    if dtype == stored.dtype or not data:
        return data
    out = casting.view(box.num_elements * ITEMSIZE_BYTES[dtype])
    before, after = _as_tensor(data, stored.dtype), _as_tensor(out, dtype)
    after.copy_(before)
    _check_overflow(fqn, before, after)
    return out


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
    _check_overflow(fqn, tensor, cast)
    return cast


def _check_overflow(fqn: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Raise MismatchError when a cast made an infinity of a number."""
    if after.dtype == before.dtype or not after.is_floating_point():
        return
    num_lost = int(after.isinf().sum()) - int(before.isinf().sum())
    if num_lost:
        raise MismatchError(
            f"{fqn}: {num_lost} values are too large for {str(after.dtype).removeprefix('torch.')}",
            hint="--dtype bf16 has the range of fp32",
        )


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
