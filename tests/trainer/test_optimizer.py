"""Optimizer state is kept by name, whether or not a parameter has been stepped. Field report 10."""

import pytest
import torch

import ckptool
from ckptool import MismatchError
from tests.trainer.tiny import DEVICE
from trainer.optimizer import build_optimizer, optimizer_state, restore_groups


def two_linears() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, 2)) for name in ("first.weight", "second.weight")}


def step_first_then_freeze_it(parameters, optimizer) -> None:
    parameters["first.weight"].grad = torch.ones(3, 2)
    optimizer.step()
    optimizer.zero_grad()
    parameters["first.weight"].requires_grad_(False)


def test_report_10_state_of_the_never_stepped_and_of_the_later_frozen_is_saved_and_comes_back(tmp_path):
    """pytorch#192202, #192224: two Linears, one is stepped and then frozen."""
    parameters = two_linears()
    optimizer = build_optimizer(parameters, lr=0.1, weight_decay=0.0)
    step_first_then_freeze_it(parameters, optimizer)
    saved = optimizer_state(optimizer, parameters)
    ckptool.save({"optim": saved}, tmp_path / "c", provenance=ckptool.Provenance("0"))

    manifest = ckptool.open_checkpoint(tmp_path / "c")
    for name in parameters:
        assert {f"optim.state.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= set(manifest.tensors)
    fresh = two_linears()
    other = build_optimizer(fresh, lr=0.1, weight_decay=0.0)
    template = optimizer_state(other, fresh)
    ckptool.load({"optim": template}, tmp_path / "c")
    restore_groups(other, fresh, template["param_groups"], pytest.fail)
    assert [other.state[parameter]["step"].item() for parameter in fresh.values()] == [1, 0]
    assert torch.equal(other.state[fresh["first.weight"]]["exp_avg"], torch.full((3, 2), 0.1))
    assert not other.state[fresh["second.weight"]]["exp_avg"].any()


@pytest.mark.parametrize(
    "settings", [{}, {"rounding_seed": 1}, {"name": "adamw8bit"}, {"name": "adamw8bit", "rounding_seed": 1}]
)
def test_gradients_are_divided_by_the_grad_scale(settings):
    """By a power of two, so that not a bit is lost."""
    updated = []
    for factor in (1, 4):
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if "rounding_seed" in settings else torch.float32
        shapes = {"codes.weight": (3, 512), "weight": (3, 5), "bias": (7,)}
        parameters = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device=DEVICE, dtype=dtype))
            for name, shape in shapes.items()
        }
        optimizer = build_optimizer(parameters, lr=0.1, weight_decay=0.1, **settings)
        optimizer.grad_scale = torch.tensor(float(factor), device=DEVICE)
        for _ in range(2):
            for parameter in parameters.values():
                gradient = torch.randn(parameter.shape, generator=generator).mul(factor)
                parameter.grad = gradient.to(parameter)
            optimizer.step()
        updated.append(parameters.values())
    assert all(torch.equal(one, other) for one, other in zip(*updated, strict=True))


@pytest.mark.parametrize("theirs", [{"fused": None}, {"fused": False, "foreach": True}])
def test_a_run_of_another_device_leaves_this_one_its_way_to_compute_the_update(theirs):
    """On a GPU our AdamW isn't `fused` for torch: taken over, that would end the next step, which has a grad_scale."""
    parameters = two_linears()
    optimizer = build_optimizer(parameters, lr=0.1, weight_decay=0.0)
    before = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
    saved = [{**group, **theirs, "eps": 1e-6} for group in optimizer_state(optimizer, parameters)["param_groups"]]
    restore_groups(optimizer, parameters, saved, pytest.fail)
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == before
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}


def test_groups_of_other_parameters_are_refused():
    parameters = two_linears()
    optimizer = build_optimizer(parameters, lr=0.1, weight_decay=0.0)
    saved = optimizer_state(optimizer, parameters)["param_groups"]
    saved[0]["params"] = ["first.weight"]
    with pytest.raises(MismatchError, match="hold other parameters"):
        restore_groups(optimizer, parameters, saved, pytest.fail)
