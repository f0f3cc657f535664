"""bf16 weights that are rounded by chance: right on average, the same after a resume, AdamW's own update else."""

import math
import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptool
from ckptool import MismatchError, UsageError
from tests.spawn import run_ranks
from tests.trainer.tiny import run
from trainer.adamw import OnePassAdamW
from trainer.rounding import round_by_chance


def test_rounding_is_to_a_neighbour_and_right_on_average():
    exact = torch.full((20000,), 1.0 + 0.25 / 128)
    rounded = round_by_chance(exact, torch.Generator().manual_seed(0)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(1.0 + 0.25 / 128, abs=2e-4)
    kept = torch.tensor([0.0, -1.5, 3.0, math.inf, -math.inf])
    assert torch.equal(round_by_chance(kept, torch.Generator()).float(), kept)
    all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # the NaN that CUDA makes
    assert round_by_chance(all_ones, torch.Generator()).isnan().all()


def test_small_updates_that_nearest_rounding_loses_arrive():
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = OnePassAdamW([weight], 0, lr=1e-4, weight_decay=0.0)
    optimizer.state[weight] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros(4096),
        "exp_avg_sq": torch.zeros(4096),
    }
    weight.grad = torch.ones_like(weight)
    for _ in range(10):
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1 - 10 * 1e-4, abs=3e-4)
    assert weight.float().mean().item() < 1


def rounded_on_two_ranks(rank):
    """This rank's rounding of a weight that both have, and of its half of one that they share."""
    mesh = init_device_mesh("cpu", (2,))
    weights = []
    for placement in (Replicate(), Shard(0)):
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(64, dtype=torch.bfloat16), mesh, [placement]))
        optimizer = OnePassAdamW([weight], 0, lr=1e-3)
        moments = {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.zeros(()), **moments}
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weights.append(weight.to_local().tolist())
    return weights


def test_copies_are_rounded_alike_and_shards_each_in_its_own_way():
    (copy, half), (other_copy, other_half) = run_ranks(2, rounded_on_two_ranks)
    assert copy == other_copy
    assert half != other_half
    assert len(set(half)) == 2


def test_a_resumed_run_rounds_as_it_would_have(root, tmp_path):
    whole = shutil.copytree(root, tmp_path / "whole")
    settings = {"param_dtype": "bf16", "stochastic_rounding": True, "schedule": "constant"}
    expected = run(whole, steps=4, **settings)
    run(root, steps=2, **settings)
    resumed = run(root, steps=4, **settings)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in expected]
    manifest = ckptool.open_checkpoint(root / "step-4")
    assert manifest.tensors["model.model.norm.weight"].dtype == "bfloat16"
    assert manifest.tensors["optim.state.model.norm.weight.exp_avg"].dtype == "float32"


@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_as_it_began_with_or_without_rounding_by_chance(root, first):
    run(root, steps=1, param_dtype="bf16", stochastic_rounding=first)
    with pytest.raises(MismatchError, match=f"of a run with{'' if first else 'out'} --stochastic-rounding") as refused:
        run(root, steps=2, param_dtype="bf16", stochastic_rounding=not first)
    assert refused.value.hint.startswith("--stochastic-rounding" if first else "--no-stochastic-rounding")


def test_other_weights_are_refused(root):
    with pytest.raises(UsageError, match="--stochastic-rounding is for bf16 weights"):
        run(root, stochastic_rounding=True)
