"""The numbers that quantised forms stand for, against plain formulas, read in pieces of any size."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckptool.core.box import Box
from ckptool.core.recipes import Found
from ckptool.errors import DamagedError
from ckptool.formats.fp8 import find_scaled
from ckptool.formats.mxfp4 import find_packed
from ckptool.formats.recipe_source import RecipeSource
from tests.memory_sink import MemorySource


def made(tensors: dict[str, torch.Tensor], found: Found, name: str, dtype: str, max_rows: int) -> torch.Tensor:
    source = RecipeSource(MemorySource(tensors), found, dtype)
    entry = source.manifest.tensors[name]
    parts = []
    for box in Box.whole(entry.shape).split_rows(max_rows):
        data = bytearray(box.num_elements * entry.itemsize_bytes)
        source.read_into(name, box, memoryview(data))
        parts.append(torch.frombuffer(data, dtype=getattr(torch, dtype)).view(box.sizes))
    return torch.cat(parts)


@pytest.mark.parametrize("max_rows", [1, 7, 100])
@pytest.mark.parametrize(
    ("shape", "grid", "block"),
    [
        ((37, 29), (4, 5), (10, 6)),
        ((37, 29), (37, 1), None),
        ((37, 29), (37,), None),
        ((37, 29), (1,), None),
        ((37, 29), (), (10, 6)),
        ((3, 11, 5), (3, 2, 1), (6, 8)),
        ((3, 11, 5), (3, 1, 1), None),
    ],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_each_element_times_the_scale_of_its_block(
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype,
    max_rows: int,
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = (torch.rand(grid) + 0.1).to(scale_dtype)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scale}
    found = find_scaled(MemorySource(tensors).manifest.tensors, block)
    result = made(tensors, found, "w.weight", "float32", max_rows)
    rows = block[0] if block and len(grid) > 1 else (1 if grid and grid[0] == shape[0] == 37 else shape[-2])
    columns = block[1] if block and len(grid) > 1 else shape[-1]
    per_matrix = scale.float().reshape(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
        *outer, i, j = index
        expected = weight.float()[tuple(index)] * per_matrix[(*outer, i // rows, j // columns)]
        assert result[tuple(index)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_packed_byte_under_every_scale(dtype: str) -> None:
    scales = torch.arange(255, dtype=torch.uint8).view(3, 85, 1)
    blocks = torch.arange(16, dtype=torch.uint8).expand(3, 85, 1, 16)
    for turn in range(16):
        tensors = {"x_blocks": blocks + 16 * turn, "x_scales": scales}
        found = find_packed(MemorySource(tensors).manifest.tensors)
        result = made(tensors, found, "x", dtype, 2)
        expected = convert_moe_packed_tensors(tensors["x_blocks"], scales, dtype=getattr(torch, dtype))
        assert torch.equal(result, expected) and result.isfinite().any()


def test_the_scale_that_is_not_a_number() -> None:
    tensors = {
        "x_blocks": torch.full((1, 2, 1, 16), 0x21, dtype=torch.uint8),
        "x_scales": torch.tensor([[[255], [127]]], dtype=torch.uint8),
    }
    result = made(tensors, find_packed(MemorySource(tensors).manifest.tensors), "x", "bfloat16", 1)
    assert result[0, :, 0].isnan().all()
    assert result[0, :2, 1].tolist() == [0.5, 1.0]  # the low half of a byte comes first


def test_a_name_that_only_looks_like_a_scale_is_a_parameter() -> None:
    tensors = {"logit_scale": torch.ones(()), "router": torch.ones(3, 2), "router_scale": torch.ones(3)}
    assert find_scaled(MemorySource(tensors).manifest.tensors, None).recipes == {}


def test_blocks_and_weights_of_one_name() -> None:
    tensors = {
        "x": torch.ones(1),
        "x_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8),
        "x_scales": torch.zeros(1, 2, 1, dtype=torch.uint8),
    }
    with pytest.raises(DamagedError, match="both packed and unpacked"):
        find_packed(MemorySource(tensors).manifest.tensors)
    del tensors["x"], tensors["x_blocks"]
    with pytest.raises(DamagedError, match="blocks that are not there"):
        find_packed(MemorySource(tensors).manifest.tensors)
