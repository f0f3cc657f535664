"""torchtitan's checkpoints, made by torchtitan: what it computes and what transformers computes are the same logits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptool
from tests.naming.titan_models import build, config_of, load_checkpoint, logits, save_checkpoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: make setup"
)

TOKENS = torch.arange(3, 15).view(1, -1)


#: How far logits may be apart, of their norm: torchtitan computes experts in bfloat16 whatever the weights are.
TOLERANCE = {"llama": 1e-5, "qwen3": 1e-5, "qwen3_moe": 4e-3, "deepseek_v3": 4e-3}


@pytest.fixture(params=list(TOLERANCE))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def distance(kind: str, ours: transformers.PreTrainedModel, theirs: Any) -> float:
    """Of the logits, in units of what is allowed."""
    expected = logits(theirs, TOKENS)
    return float((ours.eval()(TOKENS).logits - expected).norm() / expected.norm()) / TOLERANCE[kind]


def test_an_export_computes_what_torchtitan_computes(tmp_path: Path, kind: str) -> None:
    theirs = build(kind)
    save_checkpoint(theirs, tmp_path / "titan")
    config_of(kind).save_pretrained(tmp_path / "like")
    result = ckptool.export(str(tmp_path / "titan"), config=str(tmp_path / "like"), out=tmp_path / "hf")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert distance(kind, ours, theirs) < 1
    if kind == "qwen3_moe":
        assert any("expert_bias_E" in note and "other experts" in note for note in result.notes)
    name, tensor = next((n, t) for n, t in ours.named_parameters() if n.endswith(("q_proj.weight", "gate_up_proj")))
    with torch.no_grad():
        tensor.copy_(tensor.flip(-2))
    assert distance(kind, ours, theirs) > 2, f"these logits don't tell whether {name} has its rows in order"


@pytest.mark.parametrize("tied", [False, True])
def test_torchtitan_loads_what_is_exported_for_it(tmp_path: Path, kind: str, tied: bool) -> None:
    if tied and kind == "deepseek_v3":
        pytest.skip("torchtitan has no tied DeepSeek")
    config = config_of(kind, tie_word_embeddings=tied)
    torch.manual_seed(5)
    ours = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)
    ours.save_pretrained(tmp_path / "hub")
    ckptool.import_hf(str(tmp_path / "hub"), "base", root=tmp_path)
    ckptool.export("base", root=tmp_path, to="torchtitan", out=tmp_path / "titan")
    theirs = build(kind, tied=tied)
    load_checkpoint(theirs, tmp_path / "titan")
    assert distance(kind, ours, theirs) < 1
    ckptool.export(str(tmp_path / "titan"), out=tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back[name], tensor), name
