"""Embeddings that a trainer padded to a round number of rows, and what becomes of them on export."""

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
from ckptool.errors import MismatchError
from tests.tiny_models import llama, save_folder

VOCABULARY, PADDED = 97, 128
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def padded_state(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer saves that rounds the vocabulary up."""
    state = dict(model.state_dict())
    for name in {EMBEDDING, HEAD} & set(state):
        state[name] = torch.cat([state[name], torch.full((PADDED - VOCABULARY, state[name].shape[1]), 7.0)])
    return state


def trained(tmp_path: Path, tied: bool, **state: torch.Tensor) -> tuple[Any, str]:
    model = llama(tied, torch.float32)
    dcp.save({"model": padded_state(model) | state}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    model.config.save_pretrained(tmp_path)
    return model, str(tmp_path / "step-1")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"untie": True}])
def test_padding_is_cut_to_the_config(tmp_path: Path, tied: bool, options: dict[str, Any]) -> None:
    model, checkpoint = trained(tmp_path, tied)
    result = ckptool.export(checkpoint, **options)
    assert any(f"cut from {PADDED} rows to the {VOCABULARY}" in note and EMBEDDING in note for note in result.notes)
    stored = load_file(Path(result.target) / "model.safetensors")
    expected = {n: t for n, t in model.state_dict().items() if not tied or n != HEAD or "untie" in options}
    dtype = torch.bfloat16 if "dtype" in options else torch.float32
    assert stored.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].to(dtype)) for name, tensor in stored.items())
    assert json.loads((Path(result.target) / "config.json").read_text())["vocab_size"] == VOCABULARY
    if not options:
        tokens = torch.arange(2, 14).view(1, -1)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(result.target)
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("engine", ["stream", "torch"])
def test_a_checkpoint_of_ours_is_cut_too(tmp_path: Path, engine: str) -> None:
    """Imported with 128 rows, its config made to say 97."""
    model = llama(vocab_size=PADDED)
    ckptool.import_hf(str(save_folder(model, tmp_path / "hub")), "c", root=tmp_path)
    config = tmp_path / "c" / "hf" / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {PADDED}', f'"vocab_size": {VOCABULARY}'))
    result = ckptool.export("c", root=tmp_path, engine=engine, config=str(config.parent))
    stored = load_file(Path(result.target) / "model.safetensors")
    assert torch.equal(stored[EMBEDDING], model.state_dict()[EMBEDDING][:VOCABULARY])
    assert any("cut from" in note for note in result.notes)


def test_other_trainers_names_and_forms(tmp_path: Path) -> None:
    """To torchtitan's names it is cut; with torchtitan's names, padded again, it is cut on the way back."""
    model, checkpoint = trained(tmp_path / "plain", False)
    there = Path(ckptool.export(checkpoint, to="torchtitan").target)
    state = {
        fqn: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        for fqn, entry in ckptool.open_checkpoint(there).tensors.items()
    }
    dcp.load(state, checkpoint_id=there, no_dist=True)
    for name in ("tok_embeddings.weight", "lm_head.weight"):
        assert state[name].shape[0] == VOCABULARY
        state[name] = torch.cat([state[name], torch.ones(31, state[name].shape[1])])
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    model.config.save_pretrained(tmp_path)
    stored = load_file(Path(ckptool.export(str(tmp_path / "titan")).target) / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


def test_what_is_no_padding_is_refused(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path / "short", True, **{EMBEDDING: torch.ones(90, 48), HEAD: torch.ones(90, 48)})
    with pytest.raises(MismatchError, match=r"wants shape \[97, 48\]"):
        ckptool.export(checkpoint)
    _, checkpoint = trained(tmp_path / "wide", False, **{EMBEDDING: torch.ones(128, 49)})
    with pytest.raises(MismatchError, match=r"wants shape \[97, 48\]"):
        ckptool.export(checkpoint)


@pytest.mark.parametrize("kind", ["tokenizer.json", "unigram", "added_tokens.json"])
def test_rows_of_tokens_are_not_cut(tmp_path: Path, kind: str) -> None:
    _, checkpoint = trained(tmp_path, True)
    if kind == "added_tokens.json":
        (tmp_path / kind).write_text(json.dumps({"<new>": VOCABULARY}))
    else:
        words: Any = {f"w{i}": i for i in range(VOCABULARY)}
        words = [[word, 0.0] for word in words] if kind == "unigram" else words
        added = [{"id": VOCABULARY, "content": "<new>"}]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": added}))
    with pytest.raises(MismatchError, match=f"tokens up to {VOCABULARY}") as caught:
        ckptool.export(checkpoint)
    assert "vocab_size" in caught.value.hint
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {VOCABULARY}', f'"vocab_size": {PADDED}'))
    stored = load_file(Path(ckptool.export(checkpoint).target) / "model.safetensors")
    assert stored[EMBEDDING].shape[0] == PADDED
