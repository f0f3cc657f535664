"""Models that bring their own code: it is copied, and never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from tests.tiny_models import llama, save_folder

CODE = """
import pathlib
pathlib.Path({!r}).write_text("ran")
class NewConfig: ...
class NewModel: ...
"""
AUTO_MAP = {"AutoConfig": "modeling_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}


def with_code(folder: Path, **config: Any) -> Path:
    """The folder's model said to be of the code beside it; the file that this code would write."""
    ran = folder.parent / "ran"
    said = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    (folder / "config.json").write_text(json.dumps(said | {"auto_map": AUTO_MAP} | config))
    (folder / "modeling_new.py").write_text(CODE.format(str(ran)))
    return ran


def test_a_model_that_only_its_own_code_knows_keeps_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    tensors = {"transformer.wte.weight": torch.randn(7, 3), "transformer.h.0.mix": torch.arange(6).view(2, 3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ran = with_code(folder, model_type="new-and-unknown", architectures=["NewModel"])
    result = ckptool.import_hf(str(folder), "c", root=tmp_path)
    assert any("own code, which is not run" in note for note in result.notes)
    manifest = ckptool.open_checkpoint(tmp_path / "c")
    assert manifest.tensors.keys() == {f"model.{name}" for name in tensors}
    ckptool.export("c", root=tmp_path, out=tmp_path / "out")
    assert ckptool.verify("c", root=tmp_path, against=str(folder)).exit_code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    for file in ("config.json", "modeling_new.py"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    assert not ran.exists()


@pytest.mark.parametrize("engine", ["stream", "transformers"])
def test_a_known_model_with_code_of_its_own_goes_by_transformers_names(tmp_path: Path, engine: str) -> None:
    folder = save_folder(llama(), tmp_path / "hub")
    ran = with_code(folder)
    ckptool.import_hf(str(folder), "c", root=tmp_path, engine=engine)
    assert ckptool.open_checkpoint(tmp_path / "c").ties == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    ckptool.export("c", root=tmp_path, out=tmp_path / "out")
    assert (tmp_path / "out" / "modeling_new.py").read_bytes() == (folder / "modeling_new.py").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert not ran.exists()
