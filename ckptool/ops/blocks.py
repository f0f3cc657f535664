"""Walking over tensors in pieces of bounded size, and over pieces in threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckptool.core.box import Box
from ckptool.core.interfaces import Source
from ckptool.core.tensors import TensorEntry
from ckptool.storage.fetch_ahead import FetchAhead

Item = TypeVar("Item")
Out = TypeVar("Out")

#: Bytes of one piece of a tensor in memory.
BLOCK_BYTES = 8 << 20


def blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements`, each contiguous in a tensor of this shape, that cover it in C order."""
    if math.prod(shape):
        yield from _cut(Box.whole(shape), 0, max_elements)


def _cut(box: Box, dim: int, max_elements: int) -> Iterator[Box]:
    """Cut `box`, whose dims before `dim` have size 1, along `dim`; deeper where a single row is too large."""
    if box.num_elements <= max_elements:
        yield box
        return
    row_elements = math.prod(box.sizes[dim + 1 :])
    num_rows = max(1, max_elements // row_elements)
    for start in range(0, box.sizes[dim], num_rows):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(num_rows, box.sizes[dim] - start), *box.sizes[dim + 1 :])
        yield from _cut(Box(offsets, sizes), dim + 1, max_elements)


def read_blocks(
    source: Source, entry: TensorEntry, ahead: FetchAhead | None = None
) -> Iterator[tuple[Box, memoryview]]:
    """A tensor's pieces in C order. A piece's bytes are valid until the next one is asked for."""
    max_elements = max(1, BLOCK_BYTES // entry.itemsize_bytes)
    buffer = memoryview(bytearray(min(max_elements, entry.num_elements) * entry.itemsize_bytes))
    for box in blocks(entry.shape, max_elements):
        data = buffer[: box.num_elements * entry.itemsize_bytes]
        source.read_into(entry.fqn, box, data)
        if ahead is not None:
            ahead.passed()
        yield box, data


def reading_ahead(source: Source, fqns: Iterable[str]) -> FetchAhead:
    """For `read_blocks` of these tensors, one after another."""
    entries = (source.manifest.tensors[fqn] for fqn in fqns)
    return FetchAhead(
        source.ranges(entry.fqn, box)
        for entry in entries
        for box in blocks(entry.shape, max(1, BLOCK_BYTES // entry.itemsize_bytes))
    )


def num_workers() -> int:
    """Threads that read and hash side by side: one for each core, at most 16."""
    return min(16, os.cpu_count() or 1)


def in_threads(work: Callable[[Item], Out], items: Iterable[Item], workers: int = 0) -> Iterator[Out]:
    """`map` in threads; results come in the order of the items. Reads, hashes and checksums release the GIL."""
    with ThreadPoolExecutor(workers or num_workers(), thread_name_prefix="ckptool") as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
