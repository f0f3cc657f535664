from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import DamagedError
from ckptool.ops.report.steps import Steps
from ckptool.ops.report.timeline import describe, thin
from ckptool.storage.metrics_file import MetricsTail, read_records


def record(step: int, attempt: str = "a", world_size: int = 8, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "world_size": world_size, "loss": float(step), **more}


def test_a_killed_run_counts_each_step_as_it_was_trained_last() -> None:
    steps = Steps().add([*(record(n) for n in (1, 2, 3, 4)), *(record(n, "b", 6, loss=0.5) for n in (3, 4, 5))])
    assert [(step.step, step.loss) for step in steps.kept] == [(1, 1.0), (2, 2.0), (3, 0.5), (4, 0.5), (5, 0.5)]
    first, second = steps.attempts
    assert (second.first_step, second.last_step, second.num_lost) == (3, 5, 2)
    assert describe(second, first) == "8 -> 6 ranks, 2 steps trained again"


def test_a_stop_without_loss_is_a_new_start_and_loses_nothing() -> None:
    steps = Steps().add([record(1), record(2, "b")])
    assert [attempt.num_lost for attempt in steps.attempts] == [0, 0]
    assert describe(steps.attempts[1], steps.attempts[0]) == "8 ranks"


def test_records_of_another_making_are_taken_as_far_as_they_go() -> None:
    steps = Steps().add([{"step": 1, "loss": "low", "lr": 1, "consumed": 2.5, "world_size": None}, {"epoch": 3}])
    (step,) = steps.kept
    assert (step.loss, step.lr, step.consumed, step.skipped) == (None, 1.0, None, False)
    assert steps.attempts[0].world_size is None


def test_numbers_that_are_not_finite_are_none() -> None:
    (step,) = Steps().add([{"step": 1, "loss": float("nan"), "lr": float("inf"), "grad_norm": 10**400}]).kept
    assert (step.loss, step.lr, step.grad_norm) == (None, None, None)


def test_thinning_keeps_every_spike() -> None:
    steps = Steps().add(record(n, loss=9.0 if n == 7777 else -9.0 if n == 12 else 1.0) for n in range(1, 10_001))
    kept = thin(steps.kept, lambda step: step.loss, limit=100)
    assert len(kept) <= 102
    assert {-9.0, 1.0, 9.0} == {step.loss for step in kept}
    assert [step.step for step in kept] == sorted(step.step for step in kept)


def test_a_tail_reads_what_was_added_once_its_line_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(record(1)) + '\n{"step": 2')
    tail = MetricsTail(file)
    assert [found["step"] for found in tail.new_records()] == [1]
    assert tail.new_records() == []
    with file.open("a") as more:
        more.write(', "loss": 2.0}\n' + json.dumps(record(3)) + "\n")
    assert [found["step"] for found in tail.new_records()] == [2, 3]
    file.write_text(json.dumps(record(1)) + "\n")
    assert [found["step"] for found in tail.new_records()] == [1]


def test_torn_lines_are_passed_over_and_other_things_are_damage(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}')
    assert [found["step"] for found in read_records(file)] == [1, 3]
    file.write_text("[1]\n")
    with pytest.raises(DamagedError, match="no record of a step"):
        list(read_records(file))
