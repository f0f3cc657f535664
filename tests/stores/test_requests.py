"""How often a store is asked, how much is held meanwhile, and what happens when one answer of many fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckptool
from ckptool.errors import StorageError
from ckptool.ops.copy import copy
from ckptool.storage import fetch_ahead
from ckptool.storage.store import Store
from tests.ops.test_head_start import PROGRAM
from tests.quantised_models import quantise_folder
from tests.tiny_models import llama, save_folder

S3 = fsspec.AbstractFileSystem


@pytest.fixture
def calls(s3: S3, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that are made of S3, by their methods."""
    made: list[str] = []
    original = type(s3)._call_s3

    async def counted(self: S3, method: str, *args: object, **kwargs: object) -> object:
        made.append(method)
        return await original(self, method, *args, **kwargs)

    monkeypatch.setattr(type(s3), "_call_s3", counted)
    return made


@pytest.fixture
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 kB, so that the files take many."""
    for name, num_bytes in {"RANGE_BYTES": 8 << 10, "_REST_BYTES": 1 << 10, "_LEAST_BYTES": 1 << 10}.items():
        monkeypatch.setattr(fetch_ahead, name, num_bytes)
    monkeypatch.setattr("ckptool.storage.store_path.RANGE_BYTES", 8 << 10)


def test_an_import_asks_a_few_times_a_file(s3: S3, calls: list[str], hub_folder: Path, tmp_path: Path) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    num_files = len(s3.find("bucket/tiny"))
    calls.clear()
    ckptool.import_hf("s3://bucket/tiny", str(tmp_path / "m"))
    assert ckptool.diff(str(tmp_path / "m"), str(hub_folder)).equal
    # A list; every file once; of the three with weights the description before that; some of the others twice.
    assert len(calls) <= 2 * num_files


def test_weights_that_are_made_of_others_are_joined_too(s3: S3, calls: list[str], tmp_path: Path) -> None:
    folder = save_folder(llama(), tmp_path / "model")
    quantisation = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    quantise_folder(folder, (16, 16), quantisation)
    s3.put(f"{folder}/", "bucket/fp8/", recursive=True)
    num_files = len(s3.find("bucket/fp8"))
    calls.clear()
    ckptool.import_hf("s3://bucket/fp8", str(tmp_path / "m"), chunk_bytes=700)
    assert len(calls) <= 3 * num_files
    ckptool.import_hf(str(folder), str(tmp_path / "n"))
    assert ckptool.diff(str(tmp_path / "m"), str(tmp_path / "n")).equal


def test_reads_of_a_checkpoint_join_its_chunks(s3: S3, calls: list[str], root: Path, tmp_path: Path) -> None:
    copy("step-5", "s3://bucket/step-5", root=root)
    manifest = ckptool.open_checkpoint(root / "step-5")
    num_files = len(s3.find("bucket/step-5"))
    assert len(manifest.tensors) > num_files
    state = {"model": {f.removeprefix("model."): torch.zeros(e.shape) for f, e in manifest.tensors.items()}}
    reads: list[Callable[[], Any]] = [
        lambda: ckptool.load(state, "s3://bucket/step-5", allow_cast=True, allow_missing=manifest.tensors),
        lambda: ckptool.export("s3://bucket/step-5", out=tmp_path / "out"),
        lambda: ckptool.verify("s3://bucket/step-5", level="content"),
        lambda: copy("s3://bucket/step-5", str(tmp_path / "back")),
    ]
    for read in reads:
        calls.clear()
        read()
        assert len(calls) <= 3 * num_files


@pytest.mark.parametrize("read", ["import", "copy"])
def test_ranges_on_their_way_stay_within_the_memory(
    s3: S3, hub_folder: Path, root: Path, tmp_path: Path, short_ranges: None, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    s3.put(f"{root / 'step-5'}/", "bucket/step-5/", recursive=True)
    held: list[int] = []
    original = Store.fetch

    def fetch(self: Store, *args: Any) -> None:
        held.append(fetch_ahead._room.held_bytes)
        original(self, *args)

    monkeypatch.setattr(Store, "fetch", fetch)
    with fetch_ahead.room(45 << 10, 1):
        if read == "import":
            ckptool.import_hf("s3://bucket/tiny", str(tmp_path / "m"), memory_bytes=135 << 10)
        else:
            copy("s3://bucket/step-5", str(tmp_path / "m"))
    assert ckptool.diff(str(tmp_path / "m"), str(hub_folder)).equal
    assert 9 << 10 < max(held) <= 45 << 10


def test_a_range_that_fails_stops_all_and_nothing_is_published(
    s3: S3, hub_folder: Path, tmp_path: Path, short_ranges: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    original = Store.fetch

    def fetch(self: Store, name: str, offset_bytes: int, *args: Any) -> None:
        if name == "model-00002-of-00003.safetensors" and offset_bytes > 8 << 10:
            raise StorageError("no more")
        original(self, name, offset_bytes, *args)

    monkeypatch.setattr(Store, "fetch", fetch)
    with pytest.raises(StorageError, match="no more"):
        ckptool.import_hf("s3://bucket/tiny", str(tmp_path / "m"))
    assert list(tmp_path.iterdir()) == [] and fetch_ahead._room.series == []


def test_an_import_from_a_store_has_a_head_start(
    s3: S3, s3_environment: dict[str, str], hub_folder: Path, root: Path, tmp_path: Path
) -> None:
    s3.put(f"{hub_folder}/", "bucket/tiny/", recursive=True)
    command = [sys.executable, "-c", PROGRAM, "import-hf", "s3://bucket/tiny", str(tmp_path / "early")]
    environment = {**os.environ, **s3_environment}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:-1] == ["head start"]
    assert "rror" not in ended.stderr and "arning" not in ended.stderr
    early, plain = (json.loads((path / "digests.json").read_text()) for path in (tmp_path / "early", root / "step-5"))
    assert early["tensors"] == plain["tensors"]
    assert (tmp_path / "early" / "hf" / "config.json").exists()
