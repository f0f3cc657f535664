"""GGUF files: the weights that transformers makes of them, streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, MismatchError, UnsupportedError
from tests.gguf_models import SIZES, gemma2, llama, qwen3_moe, write_gguf

MODELS = [("llama", llama), ("gemma2", gemma2), ("qwen3moe", qwen3_moe), ("llama", lambda: llama(tied=True))]


@pytest.mark.parametrize(("architecture", "make"), MODELS, ids=["llama", "gemma2", "qwen3moe", "tied"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_the_same_weights_as_transformers_gives(
    tmp_path: Path, architecture: str, make: Callable[[], transformers.PreTrainedModel], dtype: str
) -> None:
    file = write_gguf(make(), tmp_path / "tiny.gguf", architecture)
    result = ckptool.import_hf(str(file), root=tmp_path, dtype=dtype, chunk_bytes=3000)
    assert any("Q8_0" in note and "not quantised" in note for note in result.notes)
    ckptool.export("tiny", root=tmp_path)
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    ours, info = type(make()).from_pretrained(tmp_path / "tiny-hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=wanted, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    assert type(ours) is type(reference)
    expected = reference.state_dict()
    assert set(expected) == set(ours.state_dict())
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == wanted and torch.equal(tensor, expected[name]), name
    tokens = torch.arange(2, 14).view(1, -1)
    assert torch.equal(ours(tokens).logits, reference(tokens).logits)


def test_a_gguf_file_can_be_compared(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    file = write_gguf(llama(), tmp_path / "hub" / "tiny.gguf", "llama")
    ckptool.import_hf(str(file), root=tmp_path)
    for name in (file, file.parent):
        assert ckptool.diff(str(name), str(tmp_path / "tiny")).equal
        assert ckptool.verify("tiny", root=tmp_path, against=str(name)).exit_code == 0


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    file = write_gguf(llama(), tmp_path / "tiny.gguf", "llama")
    ckptool.import_hf(str(file), root=tmp_path, dtype="bf16")
    config = json.loads((tmp_path / "tiny" / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"] is False
    assert (tmp_path / "tiny" / "hf" / "tokenizer.json").exists()
    record = json.loads((tmp_path / "tiny" / "ckptool.json").read_text())
    assert record["source"] == {"path": "tiny.gguf", "dtype": "bfloat16", "quantization": "GGUF F32, Q8_0"}
    result = ckptool.export("tiny", root=tmp_path)
    assert any("GGUF F32, Q8_0" in note for note in result.notes)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    file = write_gguf(llama(), tmp_path / "tiny.gguf", "llama")
    planned = ckptool.import_hf(str(file), root=tmp_path / "root", dry_run=True)
    assert planned.plan is not None and planned.plan.write_bytes > 0
    assert not (tmp_path / "root").exists()


def test_tensors_without_a_place_are_not_left_out_in_silence(tmp_path: Path) -> None:
    model = llama()
    file = write_gguf(model, tmp_path / "tiny.gguf", "llama")
    raw = file.read_bytes()
    assert raw.count(b"blk.1.ffn_down.weight") == 1
    file.write_bytes(raw.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_dwxx.weight"))
    with pytest.raises(MismatchError, match=r"no place for blk\.1\.ffn_dwxx\.weight"):
        ckptool.import_hf(str(file), root=tmp_path)


def test_the_scaled_rope_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp stores what transformers computes from the config: the two must give the same frequencies."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = llama()
    plain = LlamaRotaryEmbedding(transformers.LlamaConfig(**SIZES, rope_theta=500000.0))
    scaled = LlamaRotaryEmbedding(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    divisors = (plain.inv_freq / scaled.inv_freq).numpy()
    assert 1 < divisors.max() <= 32.001
    model.config.rope_parameters = {"rope_theta": 500000.0}
    file = write_gguf(model, tmp_path / "tiny.gguf", "llama", {"rope_freqs.weight": divisors})
    result = ckptool.import_hf(str(file), root=tmp_path)
    assert any("llama3, factor 32" in note for note in result.notes)
    config = json.loads((tmp_path / "tiny" / "hf" / "config.json").read_text())
    assert config["rope_parameters"] == rope
    odd = write_gguf(model, tmp_path / "odd.gguf", "llama", {"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(UnsupportedError, match="not known"):
        ckptool.import_hf(str(odd), root=tmp_path)


def test_a_rope_scaling_that_the_config_would_not_say(tmp_path: Path) -> None:
    file = write_gguf(llama(), tmp_path / "tiny.gguf", "llama", llama__rope__scaling__type="yarn")
    with pytest.raises(UnsupportedError, match=r"scaled \(yarn\)"):
        ckptool.import_hf(str(file), root=tmp_path)


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    file = write_gguf(llama(), tmp_path / "split.gguf", "llama", split__count=3)
    with pytest.raises(UnsupportedError, match="one of 3 files"):
        ckptool.import_hf(str(file), root=tmp_path)
    other = write_gguf(llama(), tmp_path / "other.gguf", "rwkv6")
    with pytest.raises(UnsupportedError, match="rwkv6"):
        ckptool.import_hf(str(other), root=tmp_path)
    whole = write_gguf(llama(), tmp_path / "cut.gguf", "llama").read_bytes()
    for length in (0, 3, 30, 900, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            ckptool.import_hf(str(tmp_path / "cut.gguf"), root=tmp_path)


def test_a_sound_message_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    assert run(["import-hf", str(tmp_path / "bad.gguf"), "--root", str(tmp_path)]) == DamagedError.exit_code
    assert "not a whole GGUF file" in capsys.readouterr().err
