"""Optimizer state is kept by name, whether or not a parameter has been stepped. Field report 10."""

import pytest
import torch

import ckptool
from ckptool import MismatchError
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


def test_groups_of_other_parameters_are_refused():
    parameters = two_linears()
    optimizer = build_optimizer(parameters, lr=0.1, weight_decay=0.0)
    saved = optimizer_state(optimizer, parameters)["param_groups"]
    saved[0]["params"] = ["first.weight"]
    with pytest.raises(MismatchError, match="hold other parameters"):
        restore_groups(optimizer, parameters, saved, pytest.fail)
