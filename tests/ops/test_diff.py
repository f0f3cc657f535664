"""The numbers of a diff, against torch over whole tensors; and that only a few blocks are in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.ops.blocks import blocks
from ckptool.ops.diff import Difference, layer_of
from ckptool.ops.tensor_diff import TensorDiff, diff_tensor
from tests.memory_sink import MemorySource
from tests.ops.conftest import trained_tensors

NAN, INF = float("nan"), float("inf")


def compare(one: torch.Tensor, other: torch.Tensor) -> TensorDiff:
    return diff_tensor(MemorySource({"t": one}), MemorySource({"t": other}), "t")


def saved(tmp_path: Path, name: str, state: dict) -> str:
    dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    return str(tmp_path / name)


@given(
    st.lists(st.integers(1, 7), max_size=4).map(tuple),
    st.integers(1, 40),
)
def test_blocks_cover_every_element_once_in_order(shape: tuple[int, ...], max_elements: int) -> None:
    flat = []
    for box in blocks(shape, max_elements):
        assert box.num_elements <= max_elements
        assert box.is_contiguous_in(shape)
        start = box.flat_start(shape)
        flat += range(start, start + box.num_elements)
    assert flat == list(range(math.prod(shape)))


def test_an_empty_tensor_has_no_blocks() -> None:
    assert list(blocks((3, 0), 10)) == []
    assert compare(torch.empty(3, 0), torch.empty(3, 0)).equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_bytes", [64, 8 << 20])
def test_the_numbers_are_those_of_the_whole_tensors(
    dtype: torch.dtype, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.ops.pairs.BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    one, other = torch.randn(13, 11).to(dtype), torch.randn(13, 11).to(dtype)
    a, b = one.double().flatten(), other.double().flatten()
    found = compare(one, other)
    assert found.max_abs == (a - b).abs().max().item()
    assert found.relative == pytest.approx(((a - b).abs().max() / a.abs().max()).item(), rel=1e-12)
    assert found.cosine == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-12)
    assert found.num_different == int((a != b).sum())
    assert not found.equal


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64, torch.bool]
)
def test_integers_are_compared_exactly(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        low, high = 0, 1
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    one, other = torch.tensor([low, high, 1], dtype=dtype), torch.tensor([high, high, 1], dtype=dtype)
    assert compare(one, other).max_abs == high - low
    assert compare(one, other).num_different == 1
    assert compare(one, one).equal


def test_nan_equals_nan_and_is_counted() -> None:
    one, other = torch.tensor([1.0, NAN, NAN, INF]), torch.tensor([1.0, NAN, 2.0, INF])
    found = compare(one, other)
    assert (found.num_different, found.num_nan_both, found.num_nan_one, found.max_abs) == (1, 1, 1, 0.0)
    same = compare(one, one.clone())
    assert (same.equal, same.num_nan_both) == (True, 2)


def test_infinite_and_undefined_numbers_are_none_and_come_first() -> None:
    to_infinity = compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, INF]))
    assert (to_infinity.max_abs, to_infinity.relative, to_infinity.cosine) == (None, None, None)
    from_zero = compare(torch.zeros(2), torch.ones(2))
    assert (from_zero.max_abs, from_zero.relative, from_zero.cosine) == (1.0, None, 0.0)
    assert from_zero.size == to_infinity.size == INF
    assert compare(torch.zeros(2), -torch.zeros(2)).equal


def test_a_cast_is_a_difference_of_dtype_alone_where_values_survive() -> None:
    found = compare(torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
    assert (found.num_different, found.max_abs, found.equal) == (0, 0.0, False)
    assert not compare(torch.ones(2), torch.ones(2, dtype=torch.complex64)).equal
    assert compare(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)).equal


def test_names_shapes_dtypes_and_objects_are_told(tmp_path: Path) -> None:
    one = saved(tmp_path, "a", {"w": torch.ones(3), "gone": torch.ones(1), "s": torch.ones(2, 3), "lr": 0.1, "k": [1]})
    other = saved(
        tmp_path, "b", {"w": torch.ones(3).half(), "new": torch.ones(1), "s": torch.ones(3, 2), "lr": 0.2, "k": [1]}
    )
    result = ckptool.diff(one, other)
    facts = result.details
    assert (facts["only_in_one"], facts["only_in_other"]) == (["gone"], ["new"])
    assert facts["other_dtype"] == [{"fqn": "w", "one": "float32", "other": "float16"}]
    assert facts["other_shape"] == [{"fqn": "s", "one": [2, 3], "other": [3, 2]}]
    assert facts["other_objects"] == ["lr"]
    assert (result.equal, result.exit_code) == (False, 3)
    assert ckptool.diff(one, other, keys="k*").exit_code == 0


def test_the_largest_difference_comes_first_and_layers_sum_up(tmp_path: Path, kinds: Path) -> None:
    tensors = trained_tensors()
    tensors["layers.1.up"] += 1e-3
    tensors["columns"][0, 0] += 9
    other = saved(tmp_path, "b", {"model": tensors, "step": 7, "note": {"lr": [0.1, None, True]}})
    result = ckptool.diff("foreign", other, root=kinds)
    assert [tensor.fqn for tensor in result.tensors if not tensor.equal] == ["model.columns", "model.layers.1.up"]
    assert result.details["layers"][1]["layer"] == "model.layers.1"
    assert [layer["num_different"] for layer in result.details["layers"]] == [1, 1, 0]
    assert result.to_json()["tensors"][0]["equal"] is False


@pytest.mark.parametrize(
    ("fqn", "layer"),
    [
        ("model.model.layers.11.mlp.up.weight", "model.model.layers.11"),
        ("optim.state.model.layers.0.up.exp_avg", "optim.state.model.layers.0"),
        ("model.lm_head.weight", "model.lm_head"),
        ("step", "step"),
    ],
)
def test_layers_are_names_up_to_their_number(fqn: str, layer: str) -> None:
    assert layer_of(fqn) == layer


@pytest.mark.parametrize(
    ("pair", "num_tensors"),
    [(("moe", "moe-hf"), 21), (("moe-hf", "moe"), 21), (("tiny-hf", "tiny"), 20), (("tiny", "tiny"), 20)],
)
def test_any_two_formats_compare(kinds: Path, pair: tuple[str, str], num_tensors: int) -> None:
    result: Difference = ckptool.diff(*pair, root=kinds)
    assert (result.equal, result.details["num_equal"], result.details["num_compared"]) == (
        True,
        num_tensors,
        num_tensors,
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_a_pass_over_blocks_is_a_pass_over_the_tensor(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randint(-3, 4, sizes, generator=generator) for _ in range(2))
    assert compare(one, other).num_different == int((one != other).sum())
