"""The digest taken by torch, as on a GPU, is the one that numpy takes of the bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.formats.tensor_digest import digest_tensor, sum_on_device
from ckptool.storage.digest import BLOCK_WORDS, TensorDigest, digest_box, digest_run

EVERY_DTYPE = sorted(name for name in ITEMSIZE_BYTES if hasattr(torch, name))


def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, Box(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


@given(shapes_and_boxes(), st.sampled_from(EVERY_DTYPE))
def test_any_box_of_any_dtype(case: tuple[tuple[int, ...], Box], dtype: str) -> None:
    shape, box = case
    part = part_of(make(shape, getattr(torch, dtype)), box)
    expected = digest_box(raw_bytes(part), box, shape, ITEMSIZE_BYTES[dtype])
    assert sum_on_device(part, box, shape) == expected
    assert digest_tensor(part, box, shape) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_parts_that_cross_blocks_and_pieces(dtype: torch.dtype) -> None:
    rows = 5
    columns = (3 * BLOCK_WORDS + 24) // dtype.itemsize
    whole = make((rows, columns), dtype)
    expected = digest_run(raw_bytes(whole), 0)
    for dim, cut in ((0, 2), (1, columns // 3)):
        total = TensorDigest()
        for begin, end in ((0, cut), (cut, whole.shape[dim])):
            part = whole.narrow(dim, begin, end - begin)
            offsets = (begin, 0) if dim == 0 else (0, begin)
            total += sum_on_device(part, Box(offsets, tuple(part.shape)), tuple(whole.shape))
        assert total == expected


def test_a_view_into_a_flat_buffer_at_an_odd_place() -> None:
    flat = make((101,), torch.bfloat16)
    part = flat[1:100]
    assert sum_on_device(part, Box((0,), (99,)), (99,)) == digest_run(raw_bytes(part), 0)
    assert digest_tensor(flat[:0], Box((0,), (0,)), (99,)) == TensorDigest()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    whole = make((1000, 3001), torch.bfloat16)
    box = Box((10, 7), (900, 2003))
    expected = digest_box(raw_bytes(part_of(whole, box)), box, (1000, 3001), 2)
    assert digest_tensor(part_of(whole.cuda(), box), box, (1000, 3001)) == expected
