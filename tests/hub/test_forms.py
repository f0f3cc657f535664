"""Repositories without safetensors files: what is read of them, straight from the Hub or by way of the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.cli.main import run
from ckptool.errors import UsageError
from tests import gguf_models
from tests.hub.server import Hub
from tests.ops.test_import_meta import write_meta
from tests.tiny_models import llama

ID = "org/other-form"


def write_bin(model: Any, folder: Path) -> None:
    """Two `pytorch_model-*.bin`, their index, a config, and a stray file that the index doesn't list."""
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = sorted(state)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in halves.items():
        torch.save({name: state[name].clone() for name in part}, folder / file)
    weight_map = ", ".join(f'"{name}": "{file}"' for file, part in halves.items() for name in part)
    (folder / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    (folder / "pytorch_model-stray.bin").write_bytes(b"not in the index")


def exported(root: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(Path(ckptool.export(name, root=root).target) / "model.safetensors")


@pytest.mark.parametrize("local_cache", [False, True])
@pytest.mark.parametrize("form", ["bin", "meta", "original", "gguf"])
def test_each_form_is_found_and_only_its_files_are_read(hub: Hub, tmp_path: Path, form: str, local_cache: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model: Any = gguf_models.llama() if form == "gguf" else llama(tied=False)
    if form == "bin":
        write_bin(model, folder)
    elif form == "gguf":
        gguf_models.write_gguf(model, folder / "tiny.Q8_0.gguf", "llama")
    else:
        write_meta(model, folder / "original", num_files=2)
        if form == "meta":
            folder = folder / "original"
        model.config.save_pretrained(folder)
    (folder / "model.h5").write_bytes(b"for another framework")
    hub.add(ID, folder)
    ckptool.import_hf(ID, "base", root=tmp_path, local_cache=local_cache)
    asked = [path for _, path in hub.requests if "/resolve/" in path]
    assert not any("stray" in path or path.endswith(".h5") for path in asked)
    if form == "gguf":
        ckptool.import_hf(str(folder / "tiny.Q8_0.gguf"), "expected", root=tmp_path)
        expected = exported(tmp_path, "expected")
    else:
        expected = model.state_dict()
    found = exported(tmp_path, "base")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    if not local_cache:
        ckptool.import_hf(str(folder), "from-the-folder", root=tmp_path)
        assert ckptool.diff("base", "from-the-folder", root=tmp_path).equal


def test_several_gguf_files_are_listed_and_one_is_named(hub: Hub, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    gguf_models.write_gguf(gguf_models.llama(), folder / "tiny.Q8_0.gguf", "llama")
    shutil.copy(folder / "tiny.Q8_0.gguf", folder / "tiny.Q4_K_M.gguf")
    hub.add(ID, folder)
    for src, local_cache in ((ID, False), (ID, True), (str(folder), False)):
        with pytest.raises(UsageError, match=r"2 GGUF files: tiny\.Q4_K_M\.gguf, tiny\.Q8_0\.gguf") as caught:
            ckptool.import_hf(src, "base", root=tmp_path, local_cache=local_cache)
    assert run(["import-hf", ID, "base", "--root", str(tmp_path)]) == 2
    hint = capsys.readouterr().err
    assert f"hf://{ID}/tiny.Q4_K_M.gguf" in hint and str(caught.value.hint).endswith(f"{folder}/tiny.Q4_K_M.gguf")
    hub.requests.clear()
    ckptool.import_hf(f"hf://{ID}/tiny.Q8_0.gguf", "base", root=tmp_path)
    assert not any("Q4_K_M" in path for _, path in hub.requests)
