from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.parts import PlanItem, pack
from ckptool.core.plan import PIECE_BYTES, pieces
from ckptool.core.tensors import Chunk, TensorEntry

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def item(num_bytes: int) -> PlanItem:
    shape = (num_bytes,)
    return PlanItem(("a",), (TensorEntry("a", "uint8", shape, (Chunk(Box.whole(shape)),)),))


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_packs_keep_the_order_and_the_limit(sizes: list[int], max_bytes: int) -> None:
    packs = pack([item(size) for size in sizes], max_bytes)
    assert [i.write_bytes for packed in packs for i in packed] == sizes
    for packed in packs:
        assert len(packed) == 1 or sum(i.write_bytes for i in packed) <= max_bytes
    for one, other in itertools.pairwise(packs):
        assert sum(i.write_bytes for i in one) + other[0].write_bytes > max_bytes


@given(SHAPES, st.integers(1, 50))
def test_a_box_splits_into_its_elements_in_order(shape: tuple[int, ...], max_elements: int) -> None:
    box = Box(tuple(2 for _ in shape), shape)
    outer = tuple(size + 3 for size in shape)
    parts = list(box.split(max_elements))
    assert all(part.num_elements <= max_elements for part in parts)
    assert exact_cover_fault([part.local_to(box) for part in parts], shape) == "" or not math.prod(shape)
    flat = [start for part in parts for start in elements(part, outer)]
    assert flat == elements(box, outer)


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """The flat indices of a box's elements, in C order."""
    if not box.num_elements:
        return []
    if not shape:
        return [0]
    indices = [0]
    for offset, size, n in zip(box.offsets, box.sizes, shape, strict=True):
        indices = [i * n + offset + j for i in indices for j in range(size)]
    return indices


def test_whole_rows_stay_whole() -> None:
    box = Box.whole((5, PIECE_BYTES // 2, 3))
    assert [piece.sizes for piece in pieces(box, 1, whole_rows=True)] == [(1, PIECE_BYTES // 2, 3)] * 5
    assert len(list(pieces(box, 1, whole_rows=False))) > 5
    assert [piece.sizes for piece in pieces(Box.whole((10, 4)), 2, whole_rows=True)] == [(10, 4)]
