"""OLMo-core's checkpoints, made by OLMo-core, and its models filled from ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptool
from ckptool.cli.main import run
from tests.interop.absent import doing_without, is_installed

pytestmark = pytest.mark.skipif(not is_installed("olmo_core"), reason="OLMo-core is not installed: make setup")

TOKENS = torch.arange(3, 15).view(1, -1)
KINDS = ["olmo2", "olmo3", "llama", "qwen3"]


def build(kind: str) -> Any:
    """OLMo-core's own model, norms that are not ones included. Its drivers of clouds are not there."""
    with doing_without("google"):
        from olmo_core.nn.transformer import TransformerConfig

    sizes = {"d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": 97, "hidden_size_multiplier": 1.0}
    like_llama = {**sizes, "n_kv_heads": 2, "rope_theta": 10_000}
    config = {
        "olmo2": lambda: TransformerConfig.olmo2_1M(vocab_size=97, n_heads=3),
        "olmo3": lambda: TransformerConfig.olmo3_1M(vocab_size=97, n_heads=3),
        "llama": lambda: TransformerConfig.llama_like(**like_llama),
        "qwen3": lambda: TransformerConfig.llama_like(**like_llama, qk_norm=True, use_head_qk_norm=True),
    }[kind]()
    torch.manual_seed(3)
    model = config.build(init_device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def config_of(kind: str, model: Any) -> transformers.PretrainedConfig:
    """transformers' config of the same model; OLMo-core says it itself of its own kinds."""
    if kind in ("olmo2", "olmo3"):
        with doing_without("google"):
            from olmo_core.nn.hf.config import get_hf_config

        return get_hf_config(model)
    block = model.blocks["0"]
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 97, "head_dim": 8, "intermediate_size": block.feed_forward.hidden_size}
    more = {"rope_theta": 10_000.0, "rms_norm_eps": block.attention_norm.eps, "tie_word_embeddings": False}
    return (transformers.LlamaConfig if kind == "llama" else transformers.Qwen3Config)(**sizes, **more)


@torch.no_grad()
def distance(ours: Any, theirs: Any) -> float:
    expected = theirs(TOKENS)
    return float((ours.eval()(TOKENS).logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_computes_what_olmo_core_computes(tmp_path: Path, kind: str) -> None:
    theirs = build(kind)
    with doing_without("google"):
        from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
    optimizer = torch.optim.AdamW(theirs.parameters())
    save_model_and_optim_state(tmp_path / "step1" / "model_and_optim", theirs, optimizer)
    config_of(kind, theirs).save_pretrained(tmp_path / "like")
    source = str(tmp_path / "step1" / "model_and_optim")
    ckptool.export(source, config=str(tmp_path / "like"), out=tmp_path / "hf")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert distance(ours, theirs) < 1e-5

    ckptool.import_hf(str(tmp_path / "hf"), "ours", root=tmp_path)
    ckptool.export("ours", root=tmp_path, to="olmo_core", out=tmp_path / "theirs")
    other = build(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_model_and_optim_state(tmp_path / "theirs", other)
    state = other.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())


def test_its_folder_of_a_step_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`step1/` has the model and the optimizer in `model_and_optim/`, and OLMo-core's own config.json."""
    theirs = build("olmo2")
    with doing_without("google"):
        from olmo_core.distributed.checkpoint import save_model_and_optim_state
    save_model_and_optim_state(tmp_path / "step1" / "model_and_optim", theirs)
    (tmp_path / "step1" / "config.json").write_text('{"model": {"d_model": 48}, "train_module": {}}')
    config_of("olmo2", theirs).save_pretrained(tmp_path / "like")
    step = str(tmp_path / "step1")
    assert run(["inspect", step]) == 0
    assert run(["export", step, "--out", str(tmp_path / "hf")]) == 1
    assert "--config" in capsys.readouterr().err
    assert run(["export", step, "--config", str(tmp_path / "like"), "--out", str(tmp_path / "hf")]) == 0
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert distance(ours, theirs) < 1e-5
