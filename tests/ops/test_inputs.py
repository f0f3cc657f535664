"""Folders of safetensors as they come: any dtype, any names of files. And what an export doesn't read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import DamagedError
from ckptool.formats.safetensors_file import TORCH_NAMES
from tests.tiny_models import llama, save_folder


def every_dtype() -> dict[str, torch.Tensor]:
    """All bit patterns of a byte in every dtype that torch and the installed safetensors both have."""
    found = {}
    for name in TORCH_NAMES.values():
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        raw = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).roll(7)
        tensor = (raw % 2).to(torch.bool) if dtype == torch.bool else raw.view(dtype)
        found[f"t.{name}"] = tensor.view(4, -1)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """NaNs with a payload and numbers that are not normal among them; also through torch's own reader."""
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors")
    assert len(tensors) >= 13
    ckptool.import_hf(str(tmp_path / "x.safetensors"), "c", root=tmp_path, chunk_bytes=1000)
    ckptool.export("c", root=tmp_path, out=tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    stock = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, tensor in tensors.items():
        assert found[name].dtype == stock[f"model.{name}"].dtype == tensor.dtype
        assert bits(found[name]) == bits(stock[f"model.{name}"]) == bits(tensor), name


def test_files_of_any_name_that_the_index_lists(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"part A (1).safetensors": names[::2], "weights.v2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({names[0]: torch.zeros(3)}, folder / "model-old.safetensors")  # a stray one: the index doesn't list it
    ckptool.import_hf(str(folder), "c", root=tmp_path)
    ckptool.export("c", root=tmp_path, out=tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    assert ckptool.verify("c", root=tmp_path, against=str(folder)).exit_code == 0


@pytest.mark.parametrize("to", ["hf", "torchtitan"])
def test_an_export_reads_no_byte_of_the_optimizer(tmp_path: Path, to: str) -> None:
    """Its files are zeros here: opening a single one of its entries is an error, as `verify` finds."""
    model = llama(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    path = tmp_path / "c"
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False), no_dist=True)
    model.config.save_pretrained(path)
    entries = ckptool.open_checkpoint(path).tensors
    chunks = [chunk for fqn, entry in entries.items() if fqn.startswith("optim.") for chunk in entry.chunks]
    others = {chunk.locator.file for chunk in chunks if chunk.locator}
    assert others
    for file in others:
        (path / file).write_bytes(bytes((path / file).stat().st_size))
    assert ckptool.verify(str(path), level="bytes").exit_code == DamagedError.exit_code
    ckptool.export(str(path), to=to, out=tmp_path / "out")
    if to == "hf":
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())
