"""--consume: the source goes, file by file, and nothing of it is lost, whenever the import is interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.errors import StorageError, UsageError
from ckptool.formats import dcp_sink
from ckptool.storage.direct_file import DirectFile
from tests import tiny_models


@pytest.fixture(autouse=True)
def one_file_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_sink, "_MIN_FILE_BYTES", 1)
    monkeypatch.setattr(dcp_sink, "_USUAL_NUM_FILES", 1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four shards; one holds a head of another task, which is read when the import begins and kept aside."""
    folder = tiny_models.save_folder(tiny_models.llama(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weight_map = {}
    for i, name in enumerate([*names, "model.layers.0.self_attn.rotary_emb.inv_freq"]):
        weight_map[name] = f"model-{i % 4 + 1:05}-of-00004.safetensors"
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copytree(folder, tmp_path / "kept")
    return folder


def weights(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors*") if path.name != "model.safetensors.index.json")


def test_the_source_is_gone_and_the_checkpoint_has_it_all(source: Path) -> None:
    ckptool.import_hf(str(source), "m", root=source.parent, consume=True)
    assert weights(source) == []
    assert (source / "config.json").exists()
    assert ckptool.diff("m", str(source.parent / "kept"), root=source.parent).equal
    assert (source.parent / "m" / "hf" / "ckptool-extra.safetensors").exists()


def test_an_interrupted_one_goes_on_without_what_is_gone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close, num_files = DirectFile.close, 0

    def refuse_late(file: DirectFile) -> None:
        nonlocal num_files
        num_files += 1
        if num_files > 20:
            raise OSError(28, "No space left on device")
        close(file)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "close", refuse_late)
        with pytest.raises(StorageError):
            ckptool.import_hf(str(source), "m", root=source.parent, consume=True, num_workers=1)
    left = weights(source)
    assert any(name.endswith(".consumed") for name in left) and not all(name.endswith(".consumed") for name in left)
    with pytest.raises(ckptool.CkptoolError):
        ckptool.import_hf(str(source), "other", root=source.parent)
    result = ckptool.import_hf(str(source), "m", root=source.parent, consume=True)
    assert any("went on" in note for note in result.notes)
    assert weights(source) == []
    assert ckptool.diff("m", str(source.parent / "kept"), root=source.parent).equal
    assert ckptool.verify("m", level="content", root=source.parent).findings == ()


def test_a_stand_in_takes_no_space(source: Path) -> None:
    from ckptool.formats.hf_consumed import consume

    big = source / "big.safetensors"
    save_file({"w": torch.ones(1 << 20)}, big)
    size = big.stat().st_size
    consume(big)
    stat = (source / "big.safetensors.consumed").stat()
    assert stat.st_size == size and stat.st_blocks * 512 < 64 << 10 and not big.exists()


def test_what_others_may_use_is_not_consumed(source: Path) -> None:
    file = source / "model-00001-of-00004.safetensors"
    (source.parent / "blob").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(source.parent / "blob")
    with pytest.raises((UsageError, ckptool.CkptoolError)):
        ckptool.import_hf(str(source), "m", root=source.parent, consume=True)
    with pytest.raises(UsageError, match="whole model"):
        ckptool.import_hf(str(source.parent / "kept"), "m", root=source.parent, consume=True, keys=["*layers.0*"])
    assert (source.parent / "blob").exists() and len(weights(source.parent / "kept")) == 4
