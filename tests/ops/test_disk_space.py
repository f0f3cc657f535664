"""A command starts when the disk can hold what is still to be written; else it is refused before it writes."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.core.plan import Plan, Result
from ckptool.errors import StorageError
from ckptool.formats import dcp_sink
from ckptool.ops import head_start
from ckptool.ranks import Ranks
from ckptool.storage.staging import staged_directory, staging_path
from tests.spawn import run_ranks
from tests.tiny_models import llama, save_folder

Command = Callable[..., Result]
Usage = namedtuple("Usage", "total used free")

#: More than the last blocks of all files and their folders.
SLACK_BYTES = 150_000

COMMANDS: dict[str, Command] = {
    "import-hf": lambda root, **how: ckptool.import_hf(str(root / "source"), str(root / "disk" / "x"), **how),
    "export": lambda root, **how: ckptool.export("m", root=root, out=root / "disk" / "x", max_shard_bytes=1, **how),
    "copy": lambda root, **how: ckptool.copy("m", str(root / "disk" / "x"), root=root, **how),
    "copy --model-only": lambda root, **how: ckptool.copy(
        "m", str(root / "disk" / "x"), root=root, model_only=True, **how
    ),
    "reshard": lambda root, **how: ckptool.reshard(
        "m", str(root / "disk" / "x"), root=root, mesh=Mesh.of({"dp": 8}), rewrite=True, **how
    ),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> Command:
    return COMMANDS[request.param]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a Hugging Face folder `source`, its import `m`, and `disk`, which is empty. Files are written one by one."""
    monkeypatch.setattr(dcp_sink, "_MIN_FILE_BYTES", 1)
    monkeypatch.setattr("ckptool.planner.usable_cores", lambda: 1)
    monkeypatch.setattr("ckptool.ops.copy.NUM_UPLOADS", 1)
    monkeypatch.setattr("ckptool.ops.copy._PIECE_BYTES", 16 << 10)
    for name in ("source", "disk"):
        (tmp_path / name).mkdir()
    save_file({f"w{i}": torch.randn(800, 80) for i in range(12)}, tmp_path / "source" / "model.safetensors")
    ckptool.import_hf(str(tmp_path / "source"), "m", root=tmp_path)
    return tmp_path


class Disk:
    """A disk of `num_bytes`, which holds what is below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes = 1 << 40

    def usage(self, _: Path) -> Usage:
        used = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*"))
        return Usage(self.num_bytes, used, self.num_bytes - used)

    def listing(self) -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in self.folder.rglob("*"))


@pytest.fixture
def disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(root / "disk")
    monkeypatch.setattr("shutil.disk_usage", made.usage)
    return made


def needs(command: Command, root: Path) -> int:
    plan = command(root, dry_run=True).plan
    assert plan is not None
    return plan.disk_bytes


def interrupt(command: Command, root: Path) -> None:
    def stop_midway(plan: Plan) -> Callable[[int], None]:
        moved = 0

        def report(num_bytes: int) -> None:
            nonlocal moved
            moved += num_bytes
            if moved > plan.write_bytes // 2:
                raise StorageError("pulled out")

        return report

    with pytest.raises(StorageError, match="pulled out") as caught:
        command(root, progress=stop_midway)
    assert "goes on from where" in caught.value.hint


def test_what_was_interrupted_goes_on_where_only_the_rest_has_room(command: Command, root: Path, disk: Disk) -> None:
    disk.num_bytes = needs(command, root) + SLACK_BYTES
    interrupt(command, root)
    assert disk.usage(root).free < disk.num_bytes * 3 // 4
    result = command(root)
    assert any("went on from an interrupted attempt" in note for note in result.notes)
    assert ckptool.diff("m", str(root / "disk" / "x"), root=root).equal
    assert os.listdir(root / "disk") == ["x"]


def test_it_is_refused_before_it_writes_where_the_rest_has_none(command: Command, root: Path, disk: Disk) -> None:
    needed = needs(command, root)
    interrupt(command, root)
    disk.num_bytes = needed - SLACK_BYTES
    before = disk.listing()
    for dry_run in (True, False):
        with pytest.raises(StorageError, match=r"x needs [\d.]+ [kM]B more and its disk has [\d.]+ [kM]B free"):
            command(root, dry_run=dry_run)
    assert disk.listing() == before
    disk.num_bytes = needed + SLACK_BYTES
    assert any("went on" in note for note in command(root).notes)


def test_a_command_that_finds_too_little_room_writes_nothing(command: Command, root: Path, disk: Disk) -> None:
    disk.num_bytes = needs(command, root) - 1
    with pytest.raises(StorageError, match=r"x needs [\d.]+ MB and its disk has"):
        command(root)
    assert disk.listing() == []


def test_what_is_removed_before_it_starts_over_makes_room(root: Path, disk: Disk) -> None:
    command = COMMANDS["import-hf"]
    disk.num_bytes = needs(command, root) + SLACK_BYTES
    interrupt(command, root)
    assert not any("went on" in note for note in command(root, resume=False).notes)


def test_links_that_a_killed_reshard_left_make_none(root: Path, disk: Disk) -> None:
    command = COMMANDS["reshard"]
    (root / "disk" / "other").write_bytes(os.urandom(3_000_000))
    with staged_directory(root / "disk" / "x") as staging:
        os.link(root / "disk" / "other", staging / "linked")
        disk.num_bytes = disk.usage(root).used + needs(command, root) - SLACK_BYTES
        with pytest.raises(StorageError, match=r"x needs [\d.]+ MB and its disk has"):
            command(root)


@pytest.mark.parametrize("verb", ["import-hf", "export"])
def test_bytes_of_a_head_start_are_not_asked_for_twice(
    root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    save_folder(llama(), root / "model")
    ckptool.import_hf(str(root / "model"), "llama", root=root)
    target = root / "disk" / "x"

    def command(dry_run: bool = False) -> Result:
        if verb == "import-hf":
            return ckptool.import_hf(str(root / "model"), str(target), dry_run=dry_run)
        return ckptool.export("llama", root=root, out=target, dry_run=dry_run)

    planned = command(dry_run=True).plan
    seen: list[int] = []

    def copied_first(copy: head_start.Copy, begin: Callable) -> object:
        records = head_start.at_once(copy, begin)
        seen.append(1)
        return records

    module = f"ckptool.ops.{verb.replace('-', '_')}"
    monkeypatch.setattr(f"{module}.is_worth_it", lambda num_bytes: True)
    monkeypatch.setattr(head_start, "beside", copied_first)
    disk.num_bytes = planned.disk_bytes if planned else 0
    command()
    assert seen == [1] and target.is_dir() and not staging_path(target).exists()


def go_on_together(rank: int, root: Path) -> list[str]:
    dcp_sink._MIN_FILE_BYTES = 1  # type: ignore[misc]
    disk = Disk(root / "disk")
    shutil.disk_usage = disk.usage  # type: ignore[assignment]
    needed = needs(COMMANDS["import-hf"], root)
    said: list[str] = []
    for disk.num_bytes in (needed - SLACK_BYTES, needed + SLACK_BYTES):
        try:
            COMMANDS["import-hf"](root, ranks=Ranks())
        except StorageError as error:
            said.append(str(error))
    return said


def test_all_ranks_are_refused_or_none(root: Path) -> None:
    one, other = run_ranks(2, go_on_together, root)
    assert one == other and len(one) == 1 and "needs" in one[0]
    assert ckptool.diff("m", str(root / "disk" / "x"), root=root).equal
