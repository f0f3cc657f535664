from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptool
from ckptool.formats.dcp_glance import glance
from ckptool.formats.dcp_metadata import read_manifest
from tests.tiny_models import llama, save_folder

LS_SECONDS = 1.0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("glance")
    ckptool.import_hf(str(save_folder(llama(), root / "hf")), "tiny", root=root)
    return root / "tiny"


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "step-3"))


def test_a_glance_agrees_with_the_manifest(written: Path) -> None:
    assert glance(written) == read_manifest(written).num_bytes


@pytest.mark.parametrize("name", [".metadata", "digests.json"])
def test_a_changed_description_needs_a_closer_look(name: str, copy: Path) -> None:
    raw = bytearray((copy / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / name).write_bytes(raw)
    assert glance(copy) is None


@pytest.mark.parametrize("name", [".metadata", "digests.json", "__0_0.distcp"])
def test_a_file_that_is_gone_or_short_needs_a_closer_look(name: str, copy: Path) -> None:
    os.truncate(copy / name, (copy / name).stat().st_size - 1)
    assert glance(copy) is None
    (copy / name).unlink()
    assert glance(copy) is None


def test_a_listing_says_what_the_closer_look_found(copy: Path) -> None:
    os.truncate(copy / "__0_0.distcp", 100)
    (summary,) = ckptool.list_checkpoints(copy.parent)
    assert not summary.complete and "truncated?" in summary.reason


def test_a_root_of_500_steps_is_listed_in_a_second_of_processor_time(written: Path, tmp_path: Path) -> None:
    for step in range(500):
        shutil.copytree(written, tmp_path / f"step-{step}", copy_function=os.link)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "ckptool", "ls", str(tmp_path), "--quiet"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(names) == 500
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LS_SECONDS
