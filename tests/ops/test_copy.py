"""A copy is the source byte for byte, or it does not appear."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool.cli._options import Rate
from ckptool.core.plan import Plan
from ckptool.errors import DamagedError, NotFoundError, StorageError, TargetExistsError, UnsafeError, UsageError
from ckptool.ops.copy import copy
from ckptool.storage import hashing
from tests.ops.conftest import Copy, trained_tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["tiny", "sharded", "foreign"])
def test_a_copy_has_every_byte(kinds: Path, tmp_path: Path, name: str) -> None:
    result = copy(name, str(tmp_path / "copied"), root=kinds)
    assert result.target == str(tmp_path / "copied")
    assert contents(tmp_path / "copied") == contents(kinds / name)
    assert ckptool.verify(str(tmp_path / "copied"), level="content").findings == ()
    assert os.listdir(tmp_path) == ["copied"]


def test_a_damaged_source_is_not_copied(copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("sharded")
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "__1_0.distcp").write_bytes(data)
    with pytest.raises(DamagedError, match=r"__1_0\.distcp is not what digests\.json lists") as caught:
        copy(str(folder), str(tmp_path / "copied"))
    assert caught.value.hint.startswith("ckptool verify ")
    (folder / "__1_0.distcp").write_bytes(data[:-1])
    with pytest.raises(DamagedError):
        copy(str(folder), str(tmp_path / "copied"))
    assert os.listdir(tmp_path) == ["sharded"]


class LyingFile(hashing.HashingFile):
    """Stands for a disk that loses a bit: what reaches the file is not what was written."""

    def __init__(self, path: Path, *sizes: int) -> None:
        super().__init__(path, *sizes)
        self.path = path

    def close(self) -> None:
        super().close()
        if self.tell() > 1000:
            with self.path.open("r+b") as file:
                file.seek(500)
                file.write(b"\xff\xfe")


def test_a_disk_that_loses_bits_is_noticed(kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, model_only in (("ckptool.ops.copy", False), ("ckptool.formats.dcp_sink", True)):
        monkeypatch.setattr(f"{module}.HashingFile", LyingFile)
        with pytest.raises(StorageError, match="does not read back"):
            copy("sharded", str(tmp_path / "copied"), root=kinds, model_only=model_only)
        monkeypatch.undo()
        assert not (tmp_path / "copied").exists()
    copy("sharded", str(tmp_path / "copied"), root=kinds)  # of what is left nothing is taken that is not whole
    assert contents(tmp_path / "copied") == contents(kinds / "sharded")


def test_links_out_of_the_source_are_not_followed(copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("foreign")
    (tmp_path / "secret").write_text("x")
    (folder / "notes").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeError):
        copy(str(folder), str(tmp_path / "copied"))
    assert not (tmp_path / "copied").exists()


@pytest.mark.parametrize("name", ["moe", "sharded"])
def test_the_model_alone_is_a_checkpoint_of_its_own(kinds: Path, tmp_path: Path, name: str) -> None:
    copy(name, str(tmp_path / "model"), root=kinds, model_only=True)
    before, after = ckptool.open_checkpoint(kinds / name), ckptool.open_checkpoint(tmp_path / "model")
    assert set(after.tensors) == {fqn for fqn in before.tensors if fqn.startswith("model.")}
    assert (after.objects, after.ties) == ({}, {a: c for a, c in before.ties.items() if a.startswith("model.")})
    assert after.provenance is not None and before.provenance is not None
    assert (after.provenance.step, after.provenance.world_size) == (before.provenance.step, 1)
    assert contents(tmp_path / "model" / "hf") == contents(kinds / name / "hf")
    result = ckptool.verify(str(tmp_path / "model"), level="content")
    assert result.findings == ()
    compared = ckptool.diff(str(kinds / name), str(tmp_path / "model"), keys="model.*")
    assert compared.equal and compared.details["num_compared"] > 0


def test_stock_torch_loads_the_model_alone(kinds: Path, tmp_path: Path) -> None:
    copy("foreign", str(tmp_path / "model"), root=kinds, model_only=True)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in trained_tensors().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in trained_tensors().items())


def test_a_model_that_is_copied_can_be_exported(kinds: Path, tmp_path: Path) -> None:
    copy("moe", str(tmp_path / "model"), root=kinds, model_only=True)
    ckptool.export(str(tmp_path / "model"), out=tmp_path / "out")
    assert ckptool.verify(str(tmp_path / "out"), against=str(kinds / "moe-hf")).findings == ()


def test_targets_are_refused_before_anything_is_written(kinds: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("keep me")
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (TargetExistsError, lambda: copy("tiny", str(tmp_path / "taken"), root=kinds)),
        (TargetExistsError, lambda: copy("tiny", "moe", root=kinds)),
        (UsageError, lambda: copy("tiny", str(kinds / "tiny" / "inside"), root=kinds)),
        (UsageError, lambda: copy("tiny", "tiny", root=kinds, overwrite=True)),
        (NotFoundError, lambda: copy("nothing", str(tmp_path / "x"), root=kinds)),
    ]
    for error, attempt in refused:
        with pytest.raises(error):
            attempt()
    assert (tmp_path / "taken" / "mine.txt").read_text() == "keep me"


def test_a_checkpoint_without_a_model_has_none_to_copy(tmp_path: Path) -> None:
    dcp.save({"optimizer": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(NotFoundError, match="no tensors of a model"):
        copy(str(tmp_path / "x"), str(tmp_path / "y"), model_only=True)


def test_overwriting_replaces_and_a_dry_run_does_not(kinds: Path, copy_of: Copy, tmp_path: Path) -> None:
    folder = copy_of("tiny")
    before = contents(folder)
    planned = copy("sharded", str(folder), root=kinds, overwrite=True, dry_run=True)
    assert not planned.executed and contents(folder) == before
    seen: list[int] = []
    done = copy("sharded", str(folder), root=kinds, overwrite=True, progress=lambda plan: seen.append)
    assert contents(folder) == contents(kinds / "sharded")
    assert done.plan is not None and planned.plan is not None
    assert sum(seen) == done.plan.write_bytes == planned.plan.write_bytes


def test_a_copy_that_is_stopped_goes_on_from_its_finished_files(kinds: Path, tmp_path: Path) -> None:
    planned = copy("sharded", str(tmp_path / "x"), root=kinds, dry_run=True).plan
    total = planned.write_bytes if planned else 0

    def stop_late(plan: Plan) -> Callable[[int], None]:
        moved = 0

        def report(num_bytes: int) -> None:
            nonlocal moved
            moved += num_bytes
            if moved > total * 2 // 3:
                raise StorageError("pulled out")

        return report

    with pytest.raises(StorageError, match="pulled out") as caught:
        copy("sharded", str(tmp_path / "x"), root=kinds, progress=stop_late)
    assert "goes on from where" in caught.value.hint
    assert not (tmp_path / "x").exists()
    result = copy("sharded", str(tmp_path / "x"), root=kinds)
    assert any("went on from an interrupted attempt" in note for note in result.notes)
    assert ckptool.verify(str(tmp_path / "x"), level="content").findings == ()
    assert os.listdir(tmp_path) == ["x"]


def test_a_copy_keeps_to_its_rate(kinds: Path, tmp_path: Path) -> None:
    num_bytes = sum(len(content) for content in contents(kinds / "sharded").values())
    start = time.monotonic()
    copy("sharded", str(tmp_path / "x"), root=kinds, max_bytes_per_s=num_bytes)
    assert time.monotonic() - start >= 0.95


@pytest.mark.parametrize(("text", "bytes_per_s"), [("100MB/s", 10**8), ("2 MiB / s", 2 << 20), ("512kB", 512_000)])
def test_rates_are_sizes_a_second(text: str, bytes_per_s: int) -> None:
    assert Rate().convert(text, None, None) == bytes_per_s
