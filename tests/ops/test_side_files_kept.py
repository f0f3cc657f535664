"""A checkpoint without its tokenizer, or with another, is damaged: nobody exports, copies or reshards it unawares."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.errors import DamagedError
from ckptool.ops.copy import copy
from tests.ops.conftest import Copy


def export(folder: Path, new: Path) -> None:
    ckptool.export(str(folder), out=new)


def copied(folder: Path, new: Path) -> None:
    copy(str(folder), str(new))


def reshard(folder: Path, new: Path) -> None:
    ckptool.reshard(str(folder), str(new), mesh=Mesh(("dp",), (2,)))


@pytest.mark.parametrize("use", [export, copied, reshard])
@pytest.mark.parametrize("is_there", [True, False])
def test_side_files_that_are_lost_or_changed_are_found(
    copy_of: Copy, tmp_path: Path, use: Callable[[Path, Path], None], is_there: bool
) -> None:
    folder = copy_of("tiny")
    file = folder / "hf" / "tokenizer_config.json"
    if is_there:
        file.write_text("{}")
    else:
        file.unlink()
    with pytest.raises(DamagedError, match=file.name) as refused:
        use(folder, tmp_path / "new")
    assert refused.value.exit_code == 4
    assert (refused.value.kind == "missing") is not is_there
    assert not (tmp_path / "new").exists()


def test_a_change_that_is_meant_is_exported_by_config(copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    file = folder / "hf" / "tokenizer_config.json"
    file.write_text("{}")
    with pytest.raises(DamagedError) as refused:
        export(folder, tmp_path / "new")
    assert refused.value.hint == f"if that is meant: --config {folder / 'hf'}"
    ckptool.export(str(folder), out=tmp_path / "new", config=str(folder / "hf"))
    assert (tmp_path / "new" / file.name).read_text() == "{}"


def test_a_checkpoint_that_lost_all_of_them_is_no_model_of_another_kind(copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    shutil.rmtree(folder / "hf")
    with pytest.raises(DamagedError, match="more that it lists"):
        export(folder, tmp_path / "new")
