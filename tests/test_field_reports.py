"""What went wrong for people with other tools, one test each: the numbers are the project's list of public reports.

Rows 2 and 24 need several ranks: tests/test_distributed.py. The trainer's are in tests/trainer: 4 and 5 in
test_model.py, 7 in test_retention.py and test_async_save.py, 10 in test_optimizer.py, 20, 21, 25 and 26 in
test_resume.py, 24 in test_failures.py. Those of other trainers' checkpoints
and of names (3, 11-13, 16, 18, 19, 29, 31, 33, 34): tests/naming. Of 8-bit floats and their scales (15):
tests/ops/test_import_quantised.py.
"""

from __future__ import annotations

import glob
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, MismatchError, NotFoundError
from tests.tiny_models import llama, save_folder

PROVENANCE = ckptool.Provenance("0")


def save(path: Path, **tensors: torch.Tensor) -> Path:
    ckptool.save({"model": dict(tensors)}, path, provenance=PROVENANCE)
    return path


def test_1_a_narrower_template_is_not_filled_silently(tmp_path: Path) -> None:
    """pytorch#187138: float32 loaded into bfloat16."""
    path = save(tmp_path / "c", a=torch.tensor([1.0, 1 / 3]))
    template = {"model": {"a": torch.zeros(2, dtype=torch.bfloat16)}}
    with pytest.raises(MismatchError, match="float32 in the checkpoint, bfloat16"):
        ckptool.load(template, path)
    assert template["model"]["a"].tolist() == [0, 0]
    ckptool.load(template, path, allow_cast=True)
    assert template["model"]["a"].tolist() == torch.tensor([1.0, 1 / 3]).bfloat16().tolist()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("can't be saved")


@pytest.mark.parametrize("overwrite", [False, True])
def test_6_a_failed_save_does_not_destroy_the_good_one(tmp_path: Path, overwrite: bool) -> None:
    """ezpz#196, VeOmni#1164: the second save holds an object that raises."""
    path = save(tmp_path / "step-1", a=torch.ones(3))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ckptool.CkptoolError):
        ckptool.save(
            {"model": {"a": torch.zeros(3)}, "bad": Unpicklable()}, path, provenance=PROVENANCE, overwrite=overwrite
        )
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_8_a_loader_state_goes_from_four_ranks_to_two_and_from_two_to_four(tmp_path: Path) -> None:
    """torchtitan#816: one cursor per rank; two of four were lost, and two could not become four."""
    trained: list[int] = []
    state = None
    for world_size in (4, 2, 4):
        ranks = [
            ckptool.GlobalBatchSampler(100, global_batch_size=8, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        for parts in itertools.islice(zip(*ranks, strict=True), 3):
            trained += [sample for part in parts for sample in part]
            for sampler in ranks:
                sampler.step()
        state = ranks[-1].state_dict()
    assert len(set(trained)) == len(trained) == 72


def test_9_keys_that_the_template_lacks_are_not_dropped(tmp_path: Path) -> None:
    """pytorch#148252, #126881: saved {a, b}, loaded {a}."""
    path = save(tmp_path / "c", a=torch.ones(2), b=torch.ones(2))
    with pytest.raises(MismatchError, match=r"model\.b"):
        ckptool.load({"model": {"a": torch.zeros(2)}}, path)
    with pytest.raises(MismatchError, match=r"model\.c"):
        ckptool.load({"model": {name: torch.zeros(2) for name in "abc"}}, path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(llama(), tmp_path_factory.mktemp("hub") / "tiny", max_shard_size="40KB")


@pytest.mark.parametrize("fault", ["a shard is gone", "a key is gone from its shard", "a key is gone from the index"])
def test_14_an_index_and_its_shards_must_agree(sharded: Path, tmp_path: Path, fault: str, capsys: Any) -> None:
    """sglang#32279, Relax#148: weights that are absent start at random."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(sharded, tmp_path / "hub"))
    shard = min(folder.glob("*.safetensors"))
    if fault == "a shard is gone":
        shard.unlink()
        culprit = shard.name
    else:
        tensors = load_file(shard)
        culprit = min(tensors)
        if fault == "a key is gone from its shard":
            del tensors[culprit]
            save_file(tensors, shard, {"format": "pt"})
        else:
            index = folder / "model.safetensors.index.json"
            index.write_text("\n".join(line for line in index.read_text().splitlines() if f'"{culprit}"' not in line))
    assert run(["import-hf", str(folder), "x", "--root", str(tmp_path / "ckpt")]) in (3, 4)
    assert culprit in capsys.readouterr().err
    assert not (tmp_path / "ckpt" / "x").exists()


def test_17_a_resume_at_an_epochs_end_neither_replays_nor_drops_it() -> None:
    """meta-pytorch/data#1437, KempnerForge#57, streaming#700: stopped at 30, then at 40, then at exactly 100."""
    samples, state = [], None
    for num_steps in (3, 1, 6, 1):
        sampler = ckptool.GlobalBatchSampler(100, global_batch_size=10, rank=0, world_size=1)
        if state is not None:
            sampler.load_state_dict(state)
        for batch in itertools.islice(sampler, num_steps):
            samples += batch
            sampler.step()
        state = sampler.state_dict()
    uninterrupted = ckptool.GlobalBatchSampler(100, global_batch_size=110, rank=0, world_size=1)
    assert samples == next(iter(uninterrupted))
    assert sorted(samples[:100]) == list(range(100))


def test_28_a_position_counts_units_as_they_were_defined_once() -> None:
    """llm-foundry#1277, streaming#619: counted in packed rows or per replica, data repeats. 3 documents a row."""
    rows = ckptool.DataSource("text", 40, {"documents": 120}, "ffd-block")
    before, after = (
        ckptool.GlobalBatchSampler(rows, global_batch_size=6, rank=rank, world_size=world_size)
        for rank, world_size in ((2, 3), (0, 2))
    )
    before.step()
    after.load_state_dict(before.state_dict())
    assert after.position.next_units() == range(6, 12)


def test_25_a_half_written_newest_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    """torchtitan#315, #4191, speculators#739: 10 is good, 20 lacks its .metadata, 30 is truncated."""
    for step in (10, 20, 30):
        save(tmp_path / f"step-{step}", a=torch.ones(1000))
    (tmp_path / "step-20" / ".metadata").unlink()
    with next((tmp_path / "step-30").glob("*.distcp")).open("r+b") as file:
        file.truncate(1000)
    latest = ckptool.find_latest(tmp_path)
    assert latest is not None and latest.path.name == "step-10"
    reasons = dict(latest.passed_over)
    assert "no .metadata" in reasons["step-20"] and "truncated" in reasons["step-30"]


def test_26_a_step_that_is_not_there_is_no_fresh_start(tmp_path: Path) -> None:
    """torchtitan#3732, #1311: `--resume step-7`, and an empty folder of that name."""
    save(tmp_path / "step-5", a=torch.ones(2))
    with pytest.raises(NotFoundError, match="step-7"):
        ckptool.resolve("step-7", tmp_path)
    (tmp_path / "step-7").mkdir()
    with pytest.raises((NotFoundError, DamagedError), match="step-7"):
        ckptool.load({"model": {"a": torch.zeros(2)}}, ckptool.resolve("step-7", tmp_path))


def test_27_a_killed_export_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    """NeMo-RL#3624, Automodel#1093: the name appears when the last byte is on the disk, and never before."""
    hub = save_folder(llama(hidden_size=192, vocab_size=40_000), tmp_path / "hub")
    assert run(["import-hf", str(hub), "tiny", "--root", str(tmp_path / "ckpt"), "--quiet"]) == 0
    command = [sys.executable, "-m", "ckptool", "export", "tiny", "--root", str(tmp_path / "ckpt"), "--quiet"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "out")])
    while process.poll() is None and not glob.glob(f"{tmp_path}/.out*/*/*/*.safetensors"):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists() or run(["verify", str(tmp_path / "out"), "--quiet"]) == 0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert run([*command[3:], "--out", str(tmp_path / "out")]) == 0


class RunsCode:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_32_a_downloaded_checkpoint_runs_nothing(tmp_path: Path) -> None:
    """pytorch#189308, Automodel#3240: `.metadata` that pickles os.system; refused with an exit code of its own."""
    path = save(tmp_path / "step-1", a=torch.ones(2))
    (path / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    expected = {"ls": 0, "inspect step-1": 5, "verify step-1": 5, "export step-1": 5, "prune --stale -y": 0}
    assert {command: run([*command.split(), "--root", str(tmp_path)]) for command in expected} == expected
    assert not (tmp_path / "ran").exists()
    assert path.exists()
