"""The trainer with its checkpoints in S3: alone there, or brought there from a disk."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

import ckptool
from tests.trainer import tiny
from tests.trainer.processes import kill_after_step, start_ranks
from tests.trainer.test_exactly_once import write_config
from tests.trainer.tiny import read_lines, run, surviving_samples
from trainer.cli import command
from trainer.train import train

S3 = fsspec.AbstractFileSystem
URL = "s3://bucket/run"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a base checkpoint and text, never trained in."""
    root = tmp_path_factory.mktemp("pristine")
    tiny.make_base(root / "base")
    tiny.make_data(root / "text")
    return root


@pytest.fixture
def work(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "work"))


def steps_in(s3: S3, folder: str = "bucket/run") -> list[str]:
    """The complete ones."""
    s3.invalidate_cache()
    return sorted(path.split("/")[-2] for path in s3.find(folder) if path.endswith("/.metadata"))


def test_kills_and_world_sizes_leave_the_samples_alone(s3: S3, s3_environment: dict[str, str], work: Path) -> None:
    config = write_config(work, steps=12, save_every=2, schedule="constant")
    settings = config.read_text().replace(f"root = {json.dumps(str(work))}", f"root = {json.dumps(URL)}")
    settings = settings.replace('init-from = "base"', f"init-from = {json.dumps(str(work / 'base'))}")
    config.write_text(f"{settings}work-dir = {json.dumps(str(work))}\nkeep-last = 1\nkeep-every = 8\n")
    arguments = ["--config", str(config)]
    kill_after_step(start_ranks(2, work, arguments, environment=s3_environment), work / "metrics.jsonl", step=7)
    assert steps_in(s3) == ["step-6"]
    last = start_ranks(3, work, arguments, environment=s3_environment)
    assert [rank.wait() for rank in last] == [0, 0, 0], last[0].said
    assert f"resuming from {URL}/step-6" in last[0].said
    assert steps_in(s3) == ["step-12", "step-6", "step-8"]  # the newest, where the run began, every eighth
    assert surviving_samples(work) == list(range(72))
    assert ckptool.verify(f"{URL}/step-12", level="content").exit_code == 0
    assert not any(path.name.startswith("step-") for path in work.iterdir())


def test_a_save_that_was_killed_is_passed_over_and_replaced(s3: S3, work: Path) -> None:
    config = replace(tiny.tiny_config(work, steps=2, init_from=str(work / "base")), root=URL)
    train(config)
    s3.pipe("bucket/run/step-4/__0_0.distcp", b"half")
    train(replace(config, steps=4, async_save=True))
    assert ckptool.verify(f"{URL}/step-4", level="content").exit_code == 0
    assert [line["step"] for line in read_lines(work / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_checkpoints_are_brought_from_the_disk_and_come_back(s3: S3, work: Path) -> None:
    run(work, steps=4, save_every=2, upload_to=URL, async_save=True, keep_last=1)
    assert steps_in(s3) == ["step-4"]
    assert ckptool.verify(f"{URL}/step-4", level="content", against=str(work / "step-4")).exit_code == 0
    shutil.rmtree(work / "step-4")  # the disk is lost
    run(work, steps=6, upload_to=URL)
    assert surviving_samples(work) == list(range(36))
    assert steps_in(s3) == ["step-4", "step-6"] and (work / "step-6" / ".metadata").exists()


def test_a_kill_during_an_upload_shows_nothing_and_the_next_run_goes_on(
    s3: S3, s3_environment: dict[str, str], work: Path
) -> None:
    config = write_config(work, steps=2)
    arguments = ["--config", str(config), "--upload-to", URL]
    (rank,) = start_ranks(1, work, [*arguments, "--upload-mb-per-s", "0.05"], environment=s3_environment)
    deadline = time.monotonic() + 60
    while not s3.exists("bucket/run/step-2/.ckptool-upload/started.json"):
        assert time.monotonic() < deadline and rank.is_alive, rank.said
        time.sleep(0.05)
        s3.invalidate_cache()
    rank.kill()
    assert steps_in(s3) == [] and (work / "step-2" / ".metadata").exists()
    time.sleep(1)
    s3.invalidate_cache()
    before = s3.find("bucket/run")
    time.sleep(1)
    s3.invalidate_cache()
    assert s3.find("bucket/run") == before  # the process that uploaded is gone too
    run(work, steps=2, upload_to=URL)
    assert ckptool.verify(f"{URL}/step-2", level="content", against=str(work / "step-2")).exit_code == 0


def test_an_upload_that_fails_is_said_at_the_end(s3: S3, work: Path) -> None:
    with pytest.raises(
        ckptool.StorageError, match=r"step-2 was not brought to s3://no-such-bucket/run/step-2: no such"
    ):
        run(work, steps=2, upload_to="s3://no-such-bucket/run")
    assert (work / "step-2" / ".metadata").exists()


@pytest.mark.parametrize("value", ["s3://bucket/runs", "folder"])
def test_a_root_is_a_folder_or_a_url(value: str) -> None:
    root = command.make_context("trainer", ["--steps", "1", "--root", value]).params["root"]
    assert root == (value if "://" in value else Path(value))
