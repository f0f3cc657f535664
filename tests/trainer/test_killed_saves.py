"""Killed at any moment, also inside an async save: what goes on trains every sample once, in order."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

import ckptool
from ckptool.ops.data_verify import verify_position
from tests.trainer.processes import start_ranks
from tests.trainer.tiny import DEVICE, at_most, surviving_samples

BATCH = 6


def arguments(root: Path, steps: int) -> list[str]:
    """A run that is nearly always inside a save."""
    options = {"--init-from": "base", "--root": root, "--data": root / "text", "--steps": steps, "--save-every": 1}
    options |= {"--seq-len": 16, "--global-batch-size": BATCH, "--micro-batch-size": 2, "--keep-last": 2}
    options |= {"--warmup-steps": 0, "--schedule": "constant", "--device": DEVICE}
    return [*(str(part) for pair in options.items() for part in pair), "--async-save", "--log-samples"]


def is_saving(root: Path, step: int) -> bool:
    """True while a checkpoint of a step after `step` is being written, and is not there yet."""
    return any(int(path.name.split("-")[1].split(".")[0]) > step for path in root.glob(".step-*"))


def newest_step(root: Path) -> int:
    latest = ckptool.find_latest(root)
    return int(latest.path.name.removeprefix("step-")) if latest else 0


def kill_while_saving(root: Path, num_ranks: int, steps: int, delay_s: float) -> None:
    """Start ranks, and SIGKILL all of them so long after they have begun to write a checkpoint."""
    before = newest_step(root)
    ranks = start_ranks(num_ranks, root, arguments(root, steps))
    deadline = time.monotonic() + 60
    while not is_saving(root, before):
        assert all(rank.is_alive for rank in ranks), [rank.said for rank in ranks]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(delay_s)
    for rank in ranks:
        rank.kill()


def check_every_sample_once(root: Path, steps: int) -> None:
    last = start_ranks(at_most(2), root, arguments(root, steps))
    assert not any(rank.wait() for rank in last), last[0].said
    assert surviving_samples(root) == list(range(steps * BATCH))
    assert newest_step(root) == steps
    assert verify_position(f"step-{steps}", root=root, replay=True).details["replayed"]
    assert verify_position(f"step-{steps}", root=root, replay=True).exit_code == 0
    assert not ckptool.verify(f"step-{steps}", root=root, level="content").findings
    assert json.loads((root / f"step-{steps}" / "data_position.json").read_text())["consumed"] == steps * BATCH


def test_killed_inside_async_saves_every_sample_is_trained_once(pristine, tmp_path):
    root = Path(shutil.copytree(pristine, tmp_path / "root"))
    kill_while_saving(root, at_most(2), 8, delay_s=0)
    kill_while_saving(root, at_most(3), 8, delay_s=0.15)
    check_every_sample_once(root, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_many_moments_every_sample_is_trained_once(pristine, tmp_path, seed):
    root = Path(shutil.copytree(pristine, tmp_path / "root"))
    moment = random.Random(seed)
    for _ in range(12):
        kill_while_saving(root, at_most(moment.choice([1, 2, 3])), 60, delay_s=moment.choice([0, 0.01, 0.05, 0.2, 0.6]))
    check_every_sample_once(root, 60)
