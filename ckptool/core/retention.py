"""Which checkpoints of a run stay: a pure function of what is there and of the rules.

A checkpoint stays when any rule keeps it. Only complete ones count towards a rule, the newest complete one always
stays, and so does whatever is pinned or in use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptool.errors import UsageError


@dataclass(frozen=True)
class KeepBest:
    """Keep the `count` checkpoints whose steps have the lowest ("min") or highest ("max") value of a metric."""

    metric: str
    count: int
    mode: str = "min"


@dataclass(frozen=True)
class KeepRules:
    """What to keep; 0 and None are no rule. `every` is in steps: those whose number it divides stay."""

    last: int = 0
    every: int = 0
    within_seconds: float = 0.0
    best: KeepBest | None = None

    def __bool__(self) -> bool:
        return bool(self.last or self.every or self.within_seconds or self.best)

    def check(self) -> None:
        """Raises UsageError for values that can't mean anything."""
        numbers = (self.last, self.every, self.within_seconds, *([self.best.count - 1] if self.best else []))
        if any(number < 0 for number in numbers):
            raise UsageError("what to keep can't be counted in negative numbers")
        if self.best and self.best.mode not in ("min", "max"):
            raise UsageError(f"the best of {self.best.metric}: say :min or :max, not :{self.best.mode}")


@dataclass(frozen=True)
class Candidate:
    """A `step-N` folder. `created` is a Unix time in seconds; `pinned` the reason of its pin, None without one."""

    name: str
    step: int
    num_bytes: int
    complete: bool
    created: float | None = None
    pinned: str | None = None


def reasons_to_keep(
    candidates: Sequence[Candidate],
    rules: KeepRules,
    *,
    now: float,
    metric: Mapping[int, float] | None = None,
    in_use: Collection[str] = (),
) -> dict[str, list[str]]:
    """Why each candidate stays, by name; an empty list for one that no rule keeps.

    `now` is a Unix time; `metric` has the value at each step that `rules.best` goes by. Without any rule every
    complete checkpoint stays.
    """
    complete = sorted((c for c in candidates if c.complete), key=lambda c: c.step, reverse=True)
    reasons: dict[str, list[str]] = {c.name: [] for c in candidates}
    for candidate in complete[:1]:
        reasons[candidate.name].append("the newest complete one")
    for candidate in candidates:
        if candidate.pinned is not None:
            reasons[candidate.name].append(f"pinned{f': {candidate.pinned}' if candidate.pinned else ''}")
        if candidate.name in in_use:
            reasons[candidate.name].append("in use")
    for candidate in complete if not rules else []:
        reasons[candidate.name].append("no rule was given")
    for candidate in complete[: rules.last]:
        reasons[candidate.name].append(f"one of the last {rules.last}")
    for candidate in complete:
        if rules.every and candidate.step % rules.every == 0:
            reasons[candidate.name].append(f"every {rules.every} steps")
        # An unknown age is no reason to remove.
        if rules.within_seconds and (candidate.created is None or now - candidate.created <= rules.within_seconds):
            reasons[candidate.name].append("young enough")
    for candidate, value in _best(complete, rules.best, metric or {}):
        reasons[candidate.name].append(f"among the best: {rules.best.metric if rules.best else ''} {value:g}")
    return reasons


def _best(
    complete: Sequence[Candidate], best: KeepBest | None, metric: Mapping[int, float]
) -> list[tuple[Candidate, float]]:
    """The best candidates first, with their values; of equal values the newer one is better."""
    if best is None:
        return []
    known = [(candidate, metric[candidate.step]) for candidate in complete if candidate.step in metric]
    return sorted(known, key=lambda pair: pair[1], reverse=best.mode == "max")[: best.count]
