import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.cuts import WORLD_SIZES, cut_tensor, row_cuts, stream_tensor


@given(st.integers(1, 5000), st.integers(1, 200_000), st.integers(1, 64 << 20))
def test_chunks_respect_both_bounds(num_rows: int, row_bytes: int, max_chunk_bytes: int) -> None:
    edges = [0, *row_cuts(num_rows, row_bytes, max_chunk_bytes), num_rows]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert all(size > 0 for size in sizes)
    assert all(size == 1 or size * row_bytes <= max_chunk_bytes for size in sizes)
    min_chunk_bytes = min(WORLD_SIZES.values())
    if len(sizes) > 1 and max_chunk_bytes >= 2 * min_chunk_bytes:
        assert min(sizes) * row_bytes * 2 >= min_chunk_bytes


def bytes_read(num_rows: int, row_bytes: int, world_size: int) -> float:
    """How often a stock reader, which reads each touched chunk whole, reads the tensor, over all ranks."""
    boxes = Box.whole((num_rows, 1)).cut_rows(row_cuts(num_rows, row_bytes, 32 << 20))
    per_rank = math.ceil(num_rows / world_size)
    touched = 0
    for rank in range(world_size):
        begin, end = rank * per_rank, min(num_rows, (rank + 1) * per_rank)
        if begin < end:
            mine = Box((begin, 0), (end - begin, 1))
            touched += sum(box.sizes[0] for box in boxes if box.intersect(mine))
    return touched / num_rows


@pytest.mark.parametrize("num_rows", [576, 1536, 4096, 14336, 49152, 128256])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_a_rank_reads_little_more_than_its_own_rows_of_a_large_tensor(num_rows: int, world_size: int) -> None:
    assert bytes_read(num_rows, 8192, world_size) <= (1.0 if world_size in (1, 2, 3, 4, 8, 16) else 1.2)


def llama(hidden: int, inner: int, vocab: int, num_layers: int, num_key_values: int) -> list[tuple[int, int]]:
    """Rows and bytes a row of all tensors of such a model in bf16."""
    square, narrow, wide = (hidden, hidden * 2), (num_key_values, hidden * 2), (inner, hidden * 2)
    layer = [square, narrow, narrow, square, wide, wide, (hidden, inner * 2), (hidden, 2), (hidden, 2)]
    return [(vocab, hidden * 2), *layer * num_layers]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize(
    "model",
    [llama(576, 1536, 49152, 30, 192), llama(896, 4864, 151936, 24, 128), llama(2048, 5504, 32003, 16, 512)],
    ids=["135M", "494M", "850M"],
)
def test_ranks_read_a_small_model_hardly_more_than_once(model: list[tuple[int, int]], world_size: int) -> None:
    """Small tensors and all. The archives around the chunks come to another 3 % at most."""
    read = {tensor: bytes_read(*tensor, world_size) for tensor in set(model)}
    ratio = sum(read[tensor] * tensor[0] * tensor[1] for tensor in model) / sum(rows * width for rows, width in model)
    assert ratio <= (1.02 if world_size in (2, 4, 8, 16) else 1.27)


@given(st.lists(st.integers(0, 40), max_size=3).map(tuple), st.integers(1, 500))
def test_every_shape_is_covered_exactly(shape: tuple[int, ...], piece_bytes: int) -> None:
    for cut in (cut_tensor, stream_tensor):
        entry = cut("w", "float32", shape, piece_bytes)
        assert exact_cover_fault([chunk.box for chunk in entry.chunks], shape) == ""
