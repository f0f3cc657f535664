"""AdamW's update in one kernel, on GPUs (TEST_DEVICE=cuda) only: what torch makes of the same numbers."""

import pytest
import torch

from tests.trainer.tiny import DEVICE
from trainer import adamw_kernel
from trainer.adamw import OnePassAdamW
from trainer.adamw_kernel import prepared
from trainer.adamw_math import Rates, Update, adamw_update
from trainer.optimizer import build_optimizer, kernel_note

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="the kernel is for GPUs")


def update_all(updates):
    for call in prepared(updates):
        call()


SHAPES = {"matrix": (300, 70), "vector": (70,)}
RATES = Rates(0.9, 0.95, 1e-8, (1 - 1e-4, 1e-3, 0.4), None)


def tensors(shape, dtype, moments_dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    made = [torch.randn(shape, device=DEVICE, generator=generator) for _ in range(4)]
    return made[0].to(dtype), made[1].to(dtype), made[2].to(moments_dtype), made[3].abs().to(moments_dtype)


@on_gpu
@pytest.mark.parametrize("shape", [(1,), (1023,), (8192,), (3, 8192), (33, 1000), (0, 5), ()])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_in_fp32_it_is_the_update_written_out(shape, scale):
    weight, grad, mean, square = tensors(shape, torch.float32, torch.float32)
    rates = RATES._replace(grad_scale=None if scale is None else torch.tensor(scale, device=DEVICE))
    expected = mean.clone(), square.clone()
    exact = adamw_update(weight, grad, *expected, rates)
    update_all([Update(weight, grad, mean, square, rates)])
    for one, other in zip((weight, mean, square), (exact, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@on_gpu
def test_in_bf16_it_rounds_to_the_nearest():
    weight, grad, mean, square = tensors((1000, 1000), torch.bfloat16, torch.bfloat16)
    expected = mean.float(), square.float()
    exact = adamw_update(weight, grad.float(), *expected, RATES)
    update_all([Update(weight, grad, mean, square, RATES)])
    for one, other in zip((weight, mean, square), (exact, *expected), strict=True):
        differs = one != other.bfloat16()
        assert differs.float().mean() < 0.03  # a tenth of numbers with 8 bits is often half-way between two of them
        torch.testing.assert_close(one.float(), other, rtol=2**-8, atol=1e-7)


@on_gpu
def test_rounded_by_chance_it_is_right_on_average_and_the_same_for_a_key():
    found = []
    for key in (1 << 50, 1 << 50, 7):
        weight, grad, mean, square = tensors((1000, 1000), torch.bfloat16, torch.float32)
        before = weight.clone()
        exact = adamw_update(weight, grad.float(), mean.clone(), square.clone(), RATES)
        update_all([Update(weight, grad, mean, square, RATES, key)])
        below = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
        above = (below.view(torch.int32) + (1 << 16)).view(torch.float32)
        assert ((weight.float() == below) | (weight.float() == above)).all()
        moved, wanted = (weight.float() - before.float()).mean(), (exact - before.float()).mean()
        assert moved.item() == pytest.approx(wanted.item(), abs=2e-5)
        found.append(weight)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@on_gpu
def test_many_tensors_are_updated_at_once_each_at_its_own_rates_and_wherever_it_lies():
    """Of two dtypes, of all sizes, and some that don't begin where a GPU likes to read."""
    updates, expected = [], []
    for number, size in enumerate([5, 8192, 20_000, 1, 16_384, 8191]):
        for dtype in (torch.float32, torch.bfloat16):
            made = tensors((size + 1,), dtype, torch.float32)
            weight, grad, mean, square = (t[number % 2 :][:size] for t in made)
            rates = RATES._replace(of_step=(1 - 1e-3 * number, 1e-3 / (1 + number), 0.1 * (1 + number)))
            moments = mean.clone(), square.clone()
            expected.append((adamw_update(weight, grad.float(), *moments, rates).to(dtype), *moments))
            updates.append(Update(weight, grad, mean, square, rates))
    update_all(updates)
    for update, others in zip(updates, expected, strict=True):
        tolerance = {"rtol": 2**-7, "atol": 1e-6} if update.weight.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(update.weight, others[0], **tolerance)
        for one, other in zip((update.mean, update.square), others[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torchs_fused_adamw(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    begun = {name: torch.randn(shape, device=DEVICE, generator=generator) for name, shape in SHAPES.items()}
    ours, theirs = ({name: torch.nn.Parameter(t.to(dtype)) for name, t in begun.items()} for _ in range(2))
    one = build_optimizer(ours, lr=1e-3, weight_decay=0.1)
    assert type(one) is OnePassAdamW
    other = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    one.grad_scale = other.grad_scale = torch.tensor(2.0, device=DEVICE)
    for _ in range(20):
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
            ours[name].grad, theirs[name].grad = gradient, gradient.clone()
        one.step()
        other.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def test_where_the_kernel_can_not_be_built_the_update_is_torchs_and_the_run_says_so(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nmore")

    monkeypatch.setattr(adamw_kernel, "triton", object())
    monkeypatch.setattr(adamw_kernel, "prepared", refuse)
    monkeypatch.setattr(adamw_kernel, "failure", adamw_kernel.failure.__wrapped__)
    weights = {"matrix": torch.nn.Parameter(torch.ones(2, 2, device=DEVICE))}
    optimizer = build_optimizer(weights, lr=0.1, weight_decay=0.1)
    assert type(optimizer) is torch.optim.AdamW
    reason = adamw_kernel.failure(torch.device(DEVICE), torch.bfloat16)
    assert reason == "RuntimeError: Failed to find C compiler. Please specify via CC"
    assert kernel_note(optimizer) == (f"note: AdamW's update is torch's, slower: {reason}" if DEVICE == "cuda" else "")
