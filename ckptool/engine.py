"""The loop that moves tensor bytes. Nothing else does."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ckptool.core.box import Box
from ckptool.core.interfaces import Progress, Sink, Source
from ckptool.core.plan import PIECES_IN_FLIGHT, Plan, PlanItem
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, name_some


class _Buffer:
    """A staging buffer that only grows: first touch of fresh pages costs ten times a copy into warm ones."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def view(self, num_bytes: int) -> memoryview:
        if len(self._bytes) < num_bytes:
            self._bytes = bytearray(num_bytes)
        return memoryview(self._bytes)[:num_bytes]


def run(plan: Plan, source: Source, sink: Sink, report: Progress | None = None) -> None:
    """Execute every item of `plan` and finish the sink. Memory stays at the plan's `peak_bytes`.

    `report(num_bytes)` is called after each written piece. Errors of the source and the sink pass through; the caller
    publishes the sink's folder only after a normal return.
    """
    for is_plain, items in itertools.groupby(plan.items, key=lambda item: item.transform is None):
        if is_plain:
            _stream(items, source, sink, report)
        else:
            for item in items:
                _convert(item, source, sink, report)
    sink.finish()


def _stream(items: Iterable[PlanItem], source: Source, sink: Sink, report: Progress | None) -> None:
    """Copy box by box; a thread reads the next boxes while this one writes."""
    ring = itertools.cycle([(_Buffer(), _Buffer()) for _ in range(PIECES_IN_FLIGHT)])
    pieces = ((item, chunk.box) for item in items for chunk in item.targets[0].chunks)
    pending: collections.deque[tuple[TensorEntry, Box, Future[memoryview]]] = collections.deque()

    def write_oldest() -> None:
        entry, box, filled = pending.popleft()
        data = filled.result()
        sink.write(entry.fqn, box, data)
        if report:
            report(len(data))

    with ThreadPoolExecutor(1, "read") as reader:
        try:
            for (item, box), buffers in zip(pieces, ring, strict=False):
                pending.append((item.targets[0], box, reader.submit(_read_box, item, box, source, *buffers)))
                if len(pending) == PIECES_IN_FLIGHT:
                    write_oldest()
            while pending:
                write_oldest()
        finally:
            for _, _, filled in pending:
                filled.cancel()


def _read_box(item: PlanItem, box: Box, source: Source, reading: _Buffer, casting: _Buffer) -> memoryview:
    """A box's elements in the target's dtype, in one of the two buffers."""
    entry, (source_fqn,) = item.targets[0], item.sources
    stored = source.manifest.tensors[source_fqn]
    data = reading.view(box.num_elements * stored.itemsize_bytes)
    source.read_into(source_fqn, box, data)
    if entry.dtype == stored.dtype or not data:
        return data
    out = casting.view(box.num_elements * entry.itemsize_bytes)
    before, after = _as_tensor(data, stored.dtype), _as_tensor(out, entry.dtype)
    after.copy_(before)
    _check_overflow(source_fqn, before, after)
    return out


def _convert(item: PlanItem, source: Source, sink: Sink, report: Progress | None) -> None:
    """Run a group's transform on whole tensors, and write what it makes."""
    transform = item.transform or dict
    tensors = {fqn: read_whole(source, fqn, item.targets[0].dtype) for fqn in item.sources}
    made = transform(tensors)
    del tensors
    _check_made(item.targets, made)
    for entry in item.targets:
        flat = made[entry.fqn].contiguous().view(-1)
        for chunk in entry.chunks:
            start = chunk.box.flat_start(entry.shape)
            piece = flat[start : start + chunk.box.num_elements]
            data = _as_memory(piece)
            sink.write(entry.fqn, chunk.box, data)
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
