"""The steps of a run, as `metrics.jsonl` records them: those that count, and how often the run began again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One trained step; None where the record has no such number, or one that is not finite.

    `phases` are rank 0's seconds for data, forward and backward, optimizer; `consumed` counts units of data. `ranks`
    are the seconds of each rank for what it did without waiting for others, by the names of ALONE, where measured.
    """

    step: int
    consumed: int | None
    loss: float | None
    eval_loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    checkpoint_seconds: float | None
    max_memory_bytes: int | None
    skipped: bool
    phases: tuple[float | None, ...]
    mfu: float | None = None
    ranks: dict[str, list[float]] | None = None


@dataclass(slots=True)
class Attempt:
    """What one start of the job trained. `num_lost` steps of the attempt before it were trained again."""

    name: str
    world_size: int | None
    first_step: int
    last_step: int
    num_lost: int = 0


PHASES = ("data", "forward_backward", "optimizer")
#: What a rank does without waiting for others: reading data, and a small matrix product of fixed size.
ALONE = ("data", "probe")


@dataclass
class Steps:
    """The steps of a run in order. A step that was trained again after a kill counts as it was trained last."""

    kept: list[Step] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    def add(self, records: Iterable[Mapping[str, Any]]) -> Steps:
        """Take in more records, in the order of writing; those that name no step are passed over."""
        for record in records:
            if type(record.get("step")) is int:
                self._add(_step(record), str(record.get("attempt") or ""), _integer(record, "world_size"))
        return self

    @property
    def checkpoints(self) -> list[Step]:
        """The steps after which a checkpoint was saved."""
        return [step for step in self.kept if step.checkpoint_seconds]

    def _add(self, step: Step, attempt: str, world_size: int | None) -> None:
        num_lost = 0
        while self.kept and self.kept[-1].step >= step.step:
            self.kept.pop()
            num_lost += 1
        self.kept.append(step)
        last = self.attempts[-1] if self.attempts else None
        if last is None or num_lost or (last.name, last.world_size) != (attempt, world_size):
            self.attempts.append(Attempt(attempt, world_size, step.step, step.step, num_lost))
        else:
            last.last_step = step.step


def _step(record: Mapping[str, Any]) -> Step:
    return Step(
        step=record["step"],
        consumed=_integer(record, "consumed"),
        loss=_number(record, "loss"),
        eval_loss=_number(record, "eval_loss"),
        lr=_number(record, "lr"),
        grad_norm=_number(record, "grad_norm"),
        tokens_per_second=_number(record, "tokens_per_second"),
        step_seconds=_number(record, "step_seconds"),
        checkpoint_seconds=_number(record, "checkpoint_seconds"),
        max_memory_bytes=_integer(record, "max_memory_bytes"),
        skipped=record.get("skipped") is True,
        phases=tuple(_number(record, f"{phase}_seconds") for phase in PHASES),
        mfu=_number(record, "mfu"),
        ranks=_ranks(record),
    )


def _ranks(record: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """As many finite numbers of each kind, or None."""
    lists = {name: record.get(f"rank_{name}_seconds") for name in ALONE}
    found: dict[str, list[float]] = {}
    for name, values in lists.items():
        if not isinstance(values, list) or not values:
            return None
        numbers = [_number({name: value}, name) for value in values]
        found[name] = [number for number in numbers if number is not None]
        if len(found[name]) < len(values):
            return None
    return found if len({len(numbers) for numbers in found.values()}) == 1 else None


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else None
    return value if type(value) is float and math.isfinite(value) else None


def _integer(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    return value if type(value) is int and abs(value) < 1 << 63 else None
