"""Models kept as pytorch_model.bin, as most were before safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, MismatchError, UnsafeError, UnsupportedError
from tests.tiny_models import llama, save_folder

SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def as_torch_files(folder: Path, *, num_files: int = 1, as_zip: bool = True) -> dict[str, torch.Tensor]:
    """Replace a folder's safetensors file, as transformers before 4.27 would have written it."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = SHARDS[:num_files] if num_files > 1 else ("pytorch_model.bin",)
    weight_map = {name: files[i % num_files] for i, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        torch.save(part, folder / file, _use_new_zipfile_serialization=as_zip)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_torch_files_come_back_as_safetensors(tmp_path: Path, num_files: int, as_zip: bool) -> None:
    folder = save_folder(llama(tied=False), tmp_path / "model")
    tensors = as_torch_files(folder, num_files=num_files, as_zip=as_zip)
    for engine in ("stream", "transformers"):
        ckptool.import_hf(str(folder), engine, root=tmp_path, engine=engine, chunk_bytes=1000)
        ckptool.export(engine, root=tmp_path)
        found = load_file(tmp_path / f"{engine}-hf" / "model.safetensors")
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not list((tmp_path / "stream" / "hf").glob("pytorch_model*"))
    assert (tmp_path / "stream-hf" / "assets" / "notes.bin").exists()


def test_a_folder_of_torch_files_can_be_compared(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    as_torch_files(folder)
    ckptool.import_hf(str(folder), "base", root=tmp_path)
    assert ckptool.verify("base", root=tmp_path, against=str(folder)).exit_code == 0
    changed = torch.load(folder / "pytorch_model.bin", weights_only=True)
    changed["model.norm.weight"][0] += 1
    torch.save(changed, folder / "pytorch_model.bin")
    found = ckptool.diff(str(folder), str(tmp_path / "base"))
    assert [tensor.fqn for tensor in found.tensors if not tensor.equal] == ["model.model.norm.weight"]


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    torch.save({"not": "tensors"}, folder / "pytorch_model.bin")
    result = ckptool.import_hf(str(folder), "base", root=tmp_path)
    assert result.executed


def test_one_file_by_its_name(tmp_path: Path) -> None:
    torch.save({"a.b": torch.arange(6.0).view(2, 3).t()}, tmp_path / "weights.pt")
    (tmp_path / "private.txt").write_text("not the model's")
    ckptool.import_hf(str(tmp_path / "weights.pt"), "base", root=tmp_path)
    assert not (tmp_path / "base" / "hf" / "private.txt").exists()
    assert ckptool.open_checkpoint(tmp_path / "base").tensors["model.a.b"].shape == (3, 2)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this was run",))


def test_a_hostile_file_runs_nothing_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    assert run(["import-hf", str(folder), "base", "--root", str(tmp_path / "root")]) == UnsafeError.exit_code
    output = capsys.readouterr()
    assert "nothing was run" in output.err and "this was run" not in output.out
    assert not (tmp_path / "root").exists()


def test_index_and_torch_files_must_agree(tmp_path: Path) -> None:
    folder = save_folder(llama(tied=False), tmp_path / "model")
    as_torch_files(folder, num_files=2)
    save_path = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1)}, save_path)
    with pytest.raises(MismatchError, match="two models"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
    save_path.unlink()
    (folder / SHARDS[1]).unlink()
    with pytest.raises(DamagedError, match=SHARDS[1]):
        ckptool.import_hf(str(folder), "base", root=tmp_path)


@pytest.mark.parametrize("file", ["tf_model.h5", "flax_model.msgpack"])
def test_other_frameworks_are_refused_by_name(tmp_path: Path, file: str) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(UnsupportedError, match=file):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
    save_file({"a": torch.ones(1)}, folder / "x.safetensors")
    with pytest.raises(MismatchError, match="no place for a"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)
