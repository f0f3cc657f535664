"""Llama in Meta's own form, in one file and in the pieces of a tensor-parallel group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import ckptool
from ckptool.errors import CkptoolError, DamagedError, MismatchError, NotFoundError, UnsupportedError
from ckptool.naming.rope_rows import halves_apart
from tests.tiny_models import llama

NAMES = {
    "q_proj": ("attention.wq", 0),
    "k_proj": ("attention.wk", 0),
    "v_proj": ("attention.wv", 0),
    "o_proj": ("attention.wo", 1),
    "gate_proj": ("feed_forward.w1", 0),
    "down_proj": ("feed_forward.w2", 1),
    "up_proj": ("feed_forward.w3", 0),
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "embed_tokens": ("tok_embeddings", 0),
    "lm_head": ("output", 0),
    "norm": ("norm", None),
}


def pairs_together(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of the first half of a head, then row i of its second half."""
    heads = weight.view(num_heads, 2, -1, weight.shape[1])
    return torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(weight.shape)


def write_meta(
    model: transformers.LlamaForCausalLM, folder: Path, num_files: int = 1, embedding_dim: int = 0, **params: Any
) -> Path:
    folder.mkdir(parents=True)
    config = model.config
    files: list[dict[str, torch.Tensor]] = [{"rope.freqs": torch.rand(4)} for _ in range(num_files)]
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        meta, dim = NAMES[parts[-2]]
        if meta == "tok_embeddings":
            dim = embedding_dim
        prefix = f"layers.{parts[2]}." if parts[1] == "layers" else ""
        if meta in ("attention.wq", "attention.wk"):
            heads = config.num_attention_heads if meta == "attention.wq" else config.num_key_value_heads
            tensor = pairs_together(tensor, heads)
        pieces = [tensor] * num_files if dim is None else tensor.chunk(num_files, dim)
        for file, piece in zip(files, pieces, strict=True):
            file[f"{prefix}{meta}.weight"] = piece.clone()
    for number, file in enumerate(files):
        torch.save(file, folder / f"consolidated.{number:02}.pth")
    stated = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
        "multiple_of": 16,
    }
    (folder / "params.json").write_text(json.dumps({**stated, **params}))
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    return folder


@pytest.mark.parametrize(("num_files", "embedding_dim"), [(1, 0), (2, 0), (2, 1)])
def test_logits_are_those_of_the_hub_form(tmp_path: Path, num_files: int, embedding_dim: int) -> None:
    model = llama(tied=False, dtype=torch.float32, vocab_size=98)
    folder = write_meta(model, tmp_path / "meta", num_files, embedding_dim)
    result = ckptool.import_hf(str(folder), "base", root=tmp_path, chunk_bytes=2000)
    assert any("rope.freqs" in note for note in result.notes)
    assert ckptool.verify("base", root=tmp_path, against=str(folder)).exit_code == 0
    ckptool.export("base", root=tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base-hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor) and ours.dtype == torch.float32, name
    tokens = torch.arange(2, 14).view(1, -1)
    assert torch.equal(ours(tokens).logits, model(tokens).logits)
    assert (tmp_path / "base-hf" / "tokenizer.model").read_bytes() == b"a tokenizer"
    assert not list((tmp_path / "base-hf").glob("*.pth"))


def test_reordered_rows_turn_as_metas_do() -> None:
    """Meta turns (x[2i], x[2i + 1]) as a complex number; the scores must be those of transformers' rotation."""
    torch.manual_seed(0)
    heads, head_dim, length, width = 2, 8, 5, 6
    config = transformers.LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads)
    queries, keys = torch.randn(heads * head_dim, width), torch.randn(heads * head_dim, width)
    x = torch.randn(length, width)
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(weight: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((x @ weight.t()).view(length, heads, -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)

    expected = torch.einsum("qhd,khd->hqk", turned(queries), turned(keys))
    ours = [(x @ halves_apart(w, heads).t()).view(1, length, heads, head_dim).transpose(1, 2) for w in (queries, keys)]
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
    q, k = apply_rotary_pos_emb(*ours, cos, sin)
    torch.testing.assert_close((q @ k.transpose(-1, -2))[0], expected, rtol=1e-4, atol=1e-4)


def test_the_config_above_a_folder_named_original(tmp_path: Path) -> None:
    model = llama(tied=False)
    model.config.save_pretrained(tmp_path / "repo")
    write_meta(model, tmp_path / "repo" / "original", use_scaled_rope=True)
    ckptool.import_hf(str(tmp_path / "repo" / "original"), "base", root=tmp_path)
    copied = (tmp_path / "base" / "hf" / "config.json").read_bytes()
    assert copied == (tmp_path / "repo" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("params", "error", "says"),
    [
        ({"use_scaled_rope": True}, UnsupportedError, "by which factor"),
        ({"n_heads": 0}, DamagedError, "impossible n_heads"),
        ({"n_heads": "6"}, DamagedError, "impossible n_heads"),
        ({"n_layers": 3}, MismatchError, "not that of these weights"),
        ({"n_kv_heads": 3}, MismatchError, "k_proj"),
    ],
)
def test_params_that_do_not_say_what_is_there(
    tmp_path: Path, params: dict[str, Any], error: type[CkptoolError], says: str
) -> None:
    folder = write_meta(llama(tied=False), tmp_path / "meta", **params)
    with pytest.raises(error, match=says):
        ckptool.import_hf(str(folder), "base", root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_files_that_are_not_one_model(tmp_path: Path) -> None:
    folder = write_meta(llama(tied=False, vocab_size=98), tmp_path / "meta", 2)
    second = folder / "consolidated.01.pth"
    sound = torch.load(second, weights_only=True)
    torch.save({**sound, "norm.weight": sound["norm.weight"] + 1}, second)
    with pytest.raises(MismatchError, match=r"norm\.weight differs"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
    torch.save({**sound, "vision.weight": torch.ones(1)}, second)
    with pytest.raises(DamagedError, match=r"not in all of its 2 files: vision\.weight"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
    second.unlink()
    with pytest.raises(MismatchError):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
    (folder / "params.json").unlink()
    with pytest.raises(NotFoundError, match=r"params\.json"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
