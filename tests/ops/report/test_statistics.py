from __future__ import annotations

import math

import pytest
import torch

from ckptool.ops.report.statistics import LOWEST_EXPONENT, NUM_BINS, ValueStatistics, by_layer, of_block


def statistics(tensor: torch.Tensor) -> ValueStatistics:
    data = memoryview(tensor.contiguous().view(torch.uint8).numpy())
    return of_block(data, str(tensor.dtype).removeprefix("torch."), "x")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_numbers_are_those_that_torch_computes(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = statistics(tensor)
    wide = tensor.double()
    assert found.norm == pytest.approx(float(wide.norm()))
    assert found.max_abs == float(wide.abs().max())
    assert found.root_mean_square == pytest.approx(float(wide.square().mean().sqrt()))
    assert sum(found.histogram) + found.num_zero == found.num_elements == 1000


def test_bins_are_powers_of_two_and_the_outer_ones_take_the_rest() -> None:
    found = statistics(torch.tensor([1.0, 1.5, -1.99, 2.0, 0.5, 0.0, 1e-30, 1e30]))
    counts = {LOWEST_EXPONENT + number: count for number, count in enumerate(found.histogram) if count}
    assert counts == {0: 3, 1: 1, -1: 1, LOWEST_EXPONENT: 1, LOWEST_EXPONENT + NUM_BINS - 1: 1}
    assert found.num_zero == 1


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = statistics(torch.tensor([3.0, math.nan, math.inf, -math.inf, -4.0]))
    assert (found.num_nan, found.num_inf, found.norm, found.max_abs) == (1, 2, 5.0, 4.0)
    nothing = statistics(torch.full((3,), math.nan))
    assert (nothing.norm, nothing.max_abs, nothing.root_mean_square) == (0.0, 0.0, 0.0)


def test_parts_add_up_to_the_whole() -> None:
    tensor = torch.randn(64)
    parts = statistics(tensor[:10]).plus(statistics(tensor[10:]))
    whole = statistics(tensor)
    assert parts.square_sum == pytest.approx(whole.square_sum)
    assert (parts.histogram, parts.max_abs, parts.num_elements) == (whole.histogram, whole.max_abs, 64)


def test_layers_sum_their_tensors_in_order() -> None:
    names = ["model.layers.1.a", "model.layers.0.a", "model.layers.1.b", "model.head.weight"]
    layers = by_layer([ValueStatistics(name, 2, 8.0, 2.0) for name in names])
    assert [(layer.name, layer.num_elements) for layer in layers] == [
        ("model.layers.1", 4),
        ("model.layers.0", 2),
        ("model.head", 2),
    ]
    assert layers[0].norm == 4.0
