"""The main promise: kills and changes of world size neither repeat nor skip a sample, nor bend the training."""

import json
import shutil
from pathlib import Path

import pytest

from ckptool.ops.data_verify import verify_position
from tests.spawn import run_ranks
from tests.trainer.processes import kill_after_step, start_ranks
from tests.trainer.tiny import at_most, read_lines, run, surviving_samples, tiny_config
from trainer.train import train

STEPS = 24
BATCH = 6


def train_on_rank(rank: int, root: Path, changes: dict) -> None:
    train(tiny_config(root, **changes))


def run_on(world_size: int, root: Path, **changes) -> list[dict]:
    run_ranks(world_size, train_on_rank, root, changes)
    return read_lines(root / "metrics.jsonl")


def copy_root(pristine: Path, target: Path) -> Path:
    return Path(shutil.copytree(pristine, target))


def write_config(root: Path, **changes) -> Path:
    """A TOML file with the settings of `tiny_config`."""
    names = ["seq_len", "global_batch_size", "micro_batch_size", "lr", "warmup_steps", "log_samples", "device"]
    names += ["async_save", "log_to", "compute_dtype", "deterministic"]
    config = tiny_config(root, **changes)
    settings = {name: getattr(config, name) for name in [*names, "steps", "save_every", "schedule"]}
    settings |= {"init-from": "base", "data": [str(root / "text")], "root": str(root)}
    path = root / "run.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    return path


def test_kills_and_world_sizes_leave_the_sequence_of_samples_and_the_losses_alone(pristine, tmp_path):
    smooth = copy_root(pristine, tmp_path / "smooth")
    whole = run_on(2, smooth, steps=STEPS, schedule="constant")

    rough = copy_root(pristine, tmp_path / "rough")
    config = write_config(rough, steps=STEPS, save_every=8, schedule="constant")
    kill_after_step(start_ranks(2, rough, ["--config", str(config)]), rough / "metrics.jsonl", step=9)
    assert (rough / "step-8").exists()
    assert not (rough / "step-16").exists()
    run(rough, steps=13, schedule="constant")
    last = start_ranks(at_most(3), rough, ["--config", str(config), "--save-every", "0"])
    assert not any(rank.wait() for rank in last)

    assert surviving_samples(smooth) == surviving_samples(rough) == list(range(STEPS * BATCH))
    for root in (smooth, rough):
        assert verify_position(f"step-{STEPS}", root=root, replay=True).exit_code == 0
    lines = {line["step"]: line for line in read_lines(rough / "metrics.jsonl")}
    assert [lines[step]["world_size"] for step in range(1, STEPS + 1)] == [2] * 8 + [1] * 5 + [at_most(3)] * 11
    assert [lines[step]["consumed"] for step in range(1, STEPS + 1)] == [BATCH * step for step in range(1, STEPS + 1)]
    for step, line in lines.items():
        assert line["loss"] == pytest.approx(whole[step - 1]["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(whole[step - 1]["grad_norm"], rel=1e-3)


def test_four_ranks_that_do_not_divide_the_batch_train_as_one(pristine, tmp_path):
    """With 6 windows on 4 ranks two ranks have one window less, and fill up with dummies of no weight; on 2 GPUs 5."""
    settings = {"steps": 3, "micro_batch_size": 1, "global_batch_size": 6 if at_most(4) == 4 else 5}
    alone = run(copy_root(pristine, tmp_path / "one"), **settings)
    root = copy_root(pristine, tmp_path / "four")
    shared = run_on(max(2, at_most(4)), root, **settings)
    assert surviving_samples(root) == list(range(3 * settings["global_batch_size"]))
    for one, four in zip(alone, shared, strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_rank_0_fails_alone_and_every_rank_hears_why(pristine, tmp_path):
    root = copy_root(pristine, tmp_path / "root")
    shutil.rmtree(root / "text")
    with pytest.raises(RuntimeError, match="NotFoundError: no training text at"):
        run_on(2, root)
