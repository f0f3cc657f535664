"""The curves hold what metrics.jsonl holds, each step once, and never stop a run."""

from __future__ import annotations

import math
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckptool import UsageError
from tests.trainer.tiny import read_lines, run
from trainer.curves import Curves, parse_boards
from trainer.flops import flops_per_token, peak_flops


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_after_a_crash_tensorboard_shows_each_step_as_it_was_trained_last(root: Path) -> None:
    pytest.importorskip("tensorboard")
    run(root, steps=5, save_every=2, log_to="tensorboard", schedule="constant")
    shutil.rmtree(root / "step-5")  # as if the job had been killed after step 5, with step-4 on the disk
    run(root, steps=6, save_every=2, log_to="tensorboard", schedule="constant", lr=3e-3)
    last = {line["step"]: line for line in read_lines(root / "metrics.jsonl")}
    for tag in ("loss", "lr", "consumed", "checkpoint_seconds"):
        drawn = points(root / "tensorboard", tag)
        assert [step for step, _ in drawn] == [1, 2, 3, 4, 5, 6]
        assert all(math.isclose(value, last[step][tag], rel_tol=1e-6, abs_tol=1e-9) for step, value in drawn)
    assert points(root / "tensorboard", "lr")[4][1] == pytest.approx(3e-3)


def test_a_board_that_cannot_be_written_is_said_once_and_left_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("no folder")
    said: list[str] = []
    with Curves(("tensorboard",), tmp_path, 0, said.append) as curves:
        curves.add(1, {"loss": 1.0})
        curves.add(2, {"loss": 1.0})
    assert len(said) == 1
    assert said[0].startswith("note: no curves in tensorboard from here on, training goes on: ")


def test_boards_are_named_on_the_command_line() -> None:
    assert parse_boards("none") == ()
    assert parse_boards("auto") in ((), ("tensorboard",))
    with pytest.raises(UsageError, match="choose from tensorboard, wandb"):
        parse_boards("paper")


def leveldb_log(content: bytes) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's logs, which wandb writes after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md; the header counts into the first block.
    """
    parts, place = b"", 7
    while place < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", content, place - 7)
        parts += content[place : place + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb_steps(root: Path) -> list[int]:
    """The steps of all points in the files of a run, in the order of writing."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    records = [Record.FromString(data) for file in files for data in leveldb_log(file.read_bytes()[7:])]
    return [record.history.step.num for record in records if record.HasField("history")]


def test_weights_and_biases_works_offline_and_goes_on_with_the_same_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(root, steps=2, save_every=2, log_to="wandb", schedule="constant")
    time.sleep(1.1)  # its folder is named by the second, and one start would write over the other's
    run(root, steps=4, save_every=2, log_to="wandb", schedule="constant")
    until = time.monotonic() + 20
    while len(steps := wandb_steps(root)) < 4 and time.monotonic() < until:  # its own process writes a little later
        time.sleep(0.1)
    identities = {file.stem for file in (root / "wandb").glob("offline-run-*/*.wandb")}
    assert steps == [1, 2, 3, 4]
    assert len(identities) == 1


def test_flops_count_products_of_trained_and_frozen_weights_and_attention() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, tie_word_embeddings=True, **shape))
    num = sum(parameter.numel() for parameter in model.parameters())
    assert flops_per_token(model, model.config, 128) == 6 * num + 12 * 3 * 32 * 128
    model.requires_grad_(False)
    assert flops_per_token(model, model.config, 128) == 4 * num + 12 * 3 * 32 * 128
    assert peak_flops(torch.device("cpu")) is None
