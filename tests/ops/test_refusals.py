"""What a person could lose by a slip is refused, before a byte is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.plan import Plan
from ckptool.errors import DamagedError, MismatchError, NotFoundError, StorageError, TargetExistsError, UsageError
from ckptool.ops.targets import check_disk
from tests.tiny_models import llama, mixtral, save_folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_folder(llama(), tmp_path / "model")
    ckptool.import_hf(str(tmp_path / "model"), "base", root=tmp_path / "root")
    return tmp_path / "root" / "base"


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    folder = save_folder(llama(tied=False), tmp_path / "model", max_shard_size="20KB")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(MismatchError, match="two models"):
        ckptool.import_hf(str(folder), "base", root=tmp_path)


def test_a_folder_with_more_than_a_model_is_not_overwritten(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "repo"
    ckptool.export("base", root=base.parent, out=out)
    (out / ".git").mkdir()
    with pytest.raises(TargetExistsError, match=r"holds \.git"):
        ckptool.export("base", root=base.parent, out=out, overwrite=True)
    (out / ".git").rmdir()
    ckptool.import_hf(str(tmp_path / "model"), str(out / "inner"))
    with pytest.raises(TargetExistsError, match="another checkpoint, inner"):
        ckptool.export("base", root=base.parent, out=out, overwrite=True)


def test_files_replace_files_and_folders_replace_folders(base: Path, tmp_path: Path) -> None:
    ckptool.export("base", root=base.parent, out=tmp_path / "folder")
    ckptool.export("base", root=base.parent, out=tmp_path / "all.pt", to="torch")
    (tmp_path / "empty").mkdir()
    for out, to in (("folder", "torch"), ("empty", "torch"), ("all.pt", "hf")):
        with pytest.raises(TargetExistsError, match="can't be replaced"):
            ckptool.export("base", root=base.parent, out=tmp_path / out, to=to, overwrite=True)
    with pytest.raises(TargetExistsError, match="can't be replaced"):
        ckptool.export("base", root=base.parent, out=Path("/dev/null"), to="torch", overwrite=True)


def test_nothing_is_written_into_what_is_read(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies inside"):
        ckptool.export("base", root=base.parent, out=base / "hf" / "x")
    with pytest.raises(UsageError, match="lies inside"):
        ckptool.export("base", root=base.parent, out=base / "x.pt", to="torch")
    with pytest.raises(UsageError, match="lies inside"):
        ckptool.import_hf(str(tmp_path / "model"), str(tmp_path / "model" / "sub"))


@pytest.mark.parametrize("name", ["latest", "step-9", "step-0"])
def test_names_that_mean_something_else(tmp_path: Path, name: str) -> None:
    save_folder(llama(), tmp_path / "model")
    with pytest.raises(UsageError, match=name):
        ckptool.import_hf(str(tmp_path / "model"), name, root=tmp_path)


def test_a_bare_name_is_the_roots(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    ckptool.import_hf(str(tmp_path / "model"), "./base", dtype="fp32")
    assert ckptool.resolve("base", base.parent) == base
    assert ckptool.resolve("./base", base.parent) == Path("base")


@pytest.mark.parametrize("make", [llama, mixtral])
def test_a_number_too_large_for_the_dtype(tmp_path: Path, make: object) -> None:
    folder = save_folder(make(), tmp_path / "model")  # type: ignore[operator]
    stored = load_file(folder / "model.safetensors")
    name = next(n for n in stored if "experts.0.w1" in n or "gate_proj" in n)
    stored[name][1, 2] = 1e6
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="1 values are too large for float16"):
        ckptool.import_hf(str(folder), "base", root=tmp_path, dtype="fp16")
    with pytest.raises(MismatchError, match="1 values are too large for float16"):
        ckptool.import_hf(str(folder), "base", root=tmp_path, dtype="fp16", engine="transformers")
    assert not (tmp_path / "base").exists()
    ckptool.import_hf(str(folder), "base", root=tmp_path)
    with pytest.raises(MismatchError, match="1 values are too large for float16"):
        ckptool.export("base", root=tmp_path, dtype="fp16", engine="torch")
    assert not (tmp_path / "base-hf").exists()
    with pytest.raises(MismatchError, match="1 values are too large for float16"):
        ckptool.export("base", root=tmp_path, dtype="fp16")
    ckptool.import_hf(str(folder), "base", root=tmp_path, dtype="bf16", overwrite=True)


def test_an_infinity_that_was_there_stays(tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][1] = float("inf")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for engine in ("stream", "transformers"):
        ckptool.import_hf(str(folder), engine, root=tmp_path, dtype="fp16", engine=engine)
    assert ckptool.diff("stream", "transformers", root=tmp_path).exit_code == 0


def test_sizes_that_do_not_fit_are_told_in_a_unit_that_suits(tmp_path: Path) -> None:
    plan = Plan("import-hf", "a", "b", (), 0, 0, 0, 2 * 10**18)
    with pytest.raises(StorageError, match=r"c needs 2000\.0 PB and its disk has [\d.]+ [kMGTP]B free"):
        check_disk(tmp_path / "c", plan)


def test_a_glob_that_matches_nothing_is_no_equality(base: Path) -> None:
    with pytest.raises(NotFoundError, match="zzz"):
        ckptool.diff(str(base), str(base), keys="zzz*")


def test_names_that_were_converted_need_the_config_to_be_undone(tmp_path: Path) -> None:
    save_folder(mixtral(), tmp_path / "model")
    ckptool.import_hf(str(tmp_path / "model"), "base", root=tmp_path)
    (tmp_path / "base" / "hf" / "config.json").unlink()
    with pytest.raises(DamagedError, match=r"config\.json is missing") as refused:
        ckptool.export("base", root=tmp_path)
    assert refused.value.hint.endswith("or --config HF_FOLDER_OR_ID")
