"""A rank alone that FSDP2 would give nothing but copies does without it, and nobody can tell from what it computes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckptool
from tests.trainer.test_exactly_once import run_on
from tests.trainer.tiny import run, surviving_samples
from trainer import sharding
from trainer.sharding import gains_nothing_from_sharding

#: Weights in the dtype that they are computed with, and the whole batch at once.
ALONE = {"global_batch_size": 6, "micro_batch_size": 6, "schedule": "constant"}
BF16 = {"param_dtype": "bf16", "compute_dtype": "bf16"}


@pytest.fixture
def sharded_modules(monkeypatch):
    """The modules that FSDP2 was called with."""
    modules = []

    def watched(module, **options):
        modules.append(module)
        return fully_shard(module, **options)

    monkeypatch.setattr(sharding, "fully_shard", watched)
    return modules


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BF16,
        {**BF16, "stochastic_rounding": True, "async_save": True, "activation_checkpointing": "selective"},
        {"lora_rank": 4, "eval_every": 2, "activation_checkpointing": "block", "loss": "plain"},
        pytest.param({"compile": True, "eval_data": ()}, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_it_trains_and_saves_bit_for_bit_as_with_fsdp2(root, tmp_path, monkeypatch, sharded_modules, settings):
    if "lora_rank" in settings:
        pytest.importorskip("peft")
    other = Path(shutil.copytree(root, tmp_path / "other"))
    settings = {**ALONE, "eval_data": (str(root / "text"),), "eval_units": 4, **settings, "steps": 4, "save_every": 2}
    alone = run(root, **settings)
    assert not sharded_modules
    monkeypatch.setattr(sharding, "gains_nothing_from_sharding", lambda *_: False)
    sharded = run(other, **settings)
    assert sharded_modules
    numbers = ("loss", "grad_norm", "eval_loss")
    assert [[line[key] for key in numbers] for line in alone] == [[line[key] for key in numbers] for line in sharded]
    for name in ("step-2", "step-4"):
        one, two = (ckptool.open_checkpoint(place / name) for place in (root, other))
        assert one.tensors == two.tensors
        digests = [json.loads((place / name / "digests.json").read_text()) for place in (root, other)]
        assert digests[0]["tensors"] == digests[1]["tensors"]


def test_it_goes_on_from_two_ranks_and_two_ranks_from_it(root, tmp_path, sharded_modules):
    """Steps 1 and 2 alone, 3 and 4 on two ranks with FSDP2, 5 and 6 alone again."""
    whole = Path(shutil.copytree(root, tmp_path / "whole"))
    expected = run(whole, steps=6, **ALONE)
    run(root, steps=2, **ALONE)
    run_on(2, root, steps=4, **ALONE)
    lines = run(root, steps=6, **ALONE)
    assert not sharded_modules
    assert [line["world_size"] for line in lines] == [1, 1, 2, 2, 1, 1]
    assert surviving_samples(root) == list(range(36))
    for line, one in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    whole_file, other_file = (ckptool.open_checkpoint(place / "step-6").tensors for place in (whole, root))
    assert whole_file.keys() == other_file.keys()


def test_a_resume_with_other_micro_batches_is_sharded_and_goes_on(root, sharded_modules):
    run(root, steps=2, **ALONE)
    assert not sharded_modules
    lines = run(root, steps=4, **{**ALONE, "micro_batch_size": 2})
    assert sharded_modules
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert surviving_samples(root) == list(range(24))


def test_what_fsdp2_is_kept_for():
    plain, mixed = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    fp32, bf16 = torch.float32, torch.bfloat16
    assert gains_nothing_from_sharding(plain, 1, fp32, 1, False)
    assert not gains_nothing_from_sharding(plain, 2, fp32, 1, False)
    assert not gains_nothing_from_sharding(plain, 1, bf16, 1, False)  # it casts
    assert not gains_nothing_from_sharding(mixed, 1, bf16, 1, False)
    assert not gains_nothing_from_sharding(plain, 1, fp32, 2, False)  # it adds gradients up in fp32
    assert not gains_nothing_from_sharding(plain, 1, fp32, 1, True)  # it brings weights from the host
