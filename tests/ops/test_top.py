from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool.errors import DamagedError, NotFoundError
from ckptool.ops.top import Watch, top
from ckptool.storage.root_lock import hold_root


def write(root: Path, *steps: int, **more: Any) -> None:
    root.mkdir(exist_ok=True)
    with (root / "metrics.jsonl").open("a") as file:
        for step in steps:
            record = {"step": step, "loss": 10.0 / step, "step_seconds": 2.0, "attempt": "a", "world_size": 8, **more}
            file.write(json.dumps(record) + "\n")


def test_a_look_tells_step_speed_and_time_left(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 11), tokens_per_second=100.0, data_seconds=0.5)
    facts = top(tmp_path, total_steps=110).details
    assert (facts["step"], facts["loss"], facts["tokens_per_second"], facts["step_seconds"]) == (10, 1.0, 100.0, 2.0)
    assert facts["seconds_left"] == 200.0
    assert facts["phases"] == {"data": 0.5, "forward_backward": None, "optimizer": None}
    assert not facts["quiet"]


def test_the_last_measurement_of_the_ranks_tells_who_is_behind(tmp_path: Path) -> None:
    write(tmp_path, 1, rank_data_seconds=[0.5, 0.5], rank_probe_seconds=[0.1, 0.1])
    write(tmp_path, 2, rank_data_seconds=[0.01, 0.01, 0.05, 0.4], rank_probe_seconds=[0.1, 0.3, 0.1, 0.1], mfu=0.5)
    write(tmp_path, 3, rank_data_seconds=[0.01, None], rank_probe_seconds="no list", mfu=0.7)
    facts = top(tmp_path).details
    assert facts["mfu"] == 0.6
    assert facts["ranks"] == {
        "step": 2,
        "data_seconds": [0.01, 0.01, 0.05, 0.4],
        "probe_seconds": [0.1, 0.3, 0.1, 0.1],
        "behind": [1, 3],
    }


def test_saving_counts_into_the_time_left(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    write(tmp_path, 4, checkpoint_seconds=4.0)
    assert top(tmp_path, total_steps=6).details["seconds_left"] == 2 * 3.0


def test_a_second_look_sees_what_was_added_and_the_speed_of_the_new_start(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    watch = Watch(tmp_path)
    assert watch.look().details["step"] == 3
    write(tmp_path, 3, 4, attempt="b", world_size=6, step_seconds=5.0)
    facts = watch.look().details
    assert (facts["step"], facts["step_seconds"], facts["world_size"]) == (4, 5.0, 6)
    assert (facts["num_attempts"], facts["num_lost_steps"]) == (2, 1)


def test_the_last_complete_checkpoint_is_named_not_a_newer_torn_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    watch = Watch(tmp_path)
    assert watch.look().details["checkpoint"] is None
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "__0_0.distcp").write_bytes(b"half")
    assert watch.look().details["checkpoint"]["name"] == "step-5"


def test_a_run_that_writes_nothing_is_quiet(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, step_seconds=30.0)
    for age_seconds, quiet in ((200, False), (400, True)):
        then = time.time() - age_seconds
        os.utime(tmp_path / "metrics.jsonl", (then, then))
        assert top(tmp_path).details["quiet"] is quiet


def test_a_run_has_its_root_until_it_ends(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert top(tmp_path).details["held"] is False
    lock = hold_root(tmp_path)
    assert top(tmp_path).details["held"] is True
    lock.release()
    assert top(tmp_path).details["held"] is False


def test_a_run_without_a_step_yet_has_nothing_to_tell(tmp_path: Path) -> None:
    write(tmp_path)
    facts = top(tmp_path, total_steps=5).details
    assert facts["step"] is facts["seconds_left"] is None and facts["losses"] == []


def test_a_root_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no metrics\.jsonl"):
        top(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(DamagedError):
        top(tmp_path)
