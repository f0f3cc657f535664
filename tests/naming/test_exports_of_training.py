"""Exports of what trainers save, as people have reported them to go wrong; the numbers are those of the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

import ckptool
from tests.families.tiny import build
from tests.tiny_models import llama


def train(model: Any, path: Path) -> tuple[Path, Path]:
    """A plain checkpoint of the model, and a folder with its config."""
    dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=path / "c", no_dist=True)
    model.config.save_pretrained(path / "like")
    return path / "c", path / "like"


def export(model: Any, tmp_path: Path, **options: Any) -> Path:
    checkpoint, like = train(model, tmp_path)
    return Path(ckptool.export(str(checkpoint), config=str(like), out=tmp_path / "out", **options).target)


def test_3_the_index_names_what_was_written(tmp_path: Path) -> None:
    """torchtitan#3764: an index with lm_head.weight, which a tied model doesn't emit."""
    out = export(llama(dtype=torch.float32), tmp_path, max_shard_bytes=40_000)
    listed = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    written = {name: file.name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert listed == written and len(set(written.values())) > 1
    assert "lm_head.weight" not in written


def test_12_the_config_follows_the_tensors(tmp_path: Path) -> None:
    """transformers#33780, instructlab#477: float32 master weights, and a config that says bfloat16."""
    model = llama(dtype=torch.float32)
    model.config.dtype = torch.bfloat16
    checkpoint, like = train(model, tmp_path)
    said = json.loads((like / "config.json").read_text())
    assert said["dtype"] == "bfloat16"
    for option, dtype in (("keep", "float32"), ("bf16", "bfloat16")):
        out = Path(ckptool.export(str(checkpoint), config=str(like), dtype=option, out=tmp_path / option).target)
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        assert {str(t.dtype) for t in load_file(out / "model.safetensors").values()} == {f"torch.{dtype}"}


def test_13_a_cast_leaves_integers_and_what_must_stay_float32(tmp_path: Path) -> None:
    """VeOmni#935, Automodel#3193: an int64 buffer, and a gate's bias."""
    model = build("deepseek_v3")
    out = export(model, tmp_path, dtype="bf16")
    dtypes = {name: t.dtype for name, t in load_file(out / "model.safetensors").items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    weight, bias = (f"model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias"))
    assert kept in ({weight, bias}, {bias})  # transformers' rule: since some version after 5.17 for the weight too
    assert {dtype for name, dtype in dtypes.items() if name not in kept} == {torch.bfloat16}
    dcp.save({"model": {"a": torch.ones(2), "ids": torch.arange(300)}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    ckptool.export(str(tmp_path / "plain"), dtype="bf16", out=tmp_path / "cast")
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    assert cast["a"].dtype == torch.bfloat16 and torch.equal(cast["ids"], torch.arange(300))


@pytest.mark.parametrize(
    ("kind", "dtype", "kept"),
    [("t5", "fp16", ".wo."), ("rwkv", "fp16", "time_decay"), ("flint", "bf16", "sinks"), ("t5", "bf16", "")],
)
def test_13_what_must_stay_float32_is_what_from_pretrained_keeps(
    tmp_path: Path, kind: str, dtype: str, kept: str
) -> None:
    """Some models in float16 only, some in bfloat16 too; on the way in and on the way out."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    model = build(kind)
    model.save_pretrained(tmp_path / "hub")
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    expected = type(model).from_pretrained(tmp_path / "hub", dtype=wanted).state_dict()
    assert any(t.dtype == torch.float32 and kept in name for name, t in expected.items()) == bool(kept)
    ckptool.import_hf(str(tmp_path / "hub"), "cast", root=tmp_path, dtype=dtype)
    ckptool.import_hf(str(tmp_path / "hub"), "plain", root=tmp_path)
    ckptool.export("plain", root=tmp_path, out=tmp_path / "out", dtype=dtype)
    cast = ckptool.open_checkpoint(tmp_path / "cast").tensors
    exported = type(model).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in expected.items():
        assert cast[f"model.{name}"].dtype == str(tensor.dtype).removeprefix("torch."), name
        assert torch.equal(exported[name].float(), tensor.float()), name
    assert {t.dtype for t in stored.values()} == {t.dtype for t in expected.values()}


def test_19_a_tied_head_is_written_on_request(tmp_path: Path) -> None:
    """transformers#30202, torchtune#1381: consumers that expect lm_head.weight."""
    model = llama(dtype=torch.float32)
    out = export(model, tmp_path, untie=True)
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    ours = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not ours.config.tie_word_embeddings and torch.equal(ours.lm_head.weight, model.lm_head.weight)


def test_29_a_transposed_weight_is_exported_as_it_is_seen(tmp_path: Path) -> None:
    """safetensors#469: a tensor that is not contiguous."""
    model = llama(dtype=torch.float32)
    state = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in model.state_dict().items()}
    assert not state["lm_head.weight"].is_contiguous()
    _, like = train(model, tmp_path)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "strided", no_dist=True)
    ckptool.export(str(tmp_path / "strided"), config=str(like), out=tmp_path / "out")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, model.state_dict()[name]), name
