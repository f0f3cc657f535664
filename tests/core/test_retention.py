from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.retention import Candidate, KeepBest, KeepRules, reasons_to_keep
from ckptool.errors import UsageError

DAY = 86400.0
NOW = 100 * DAY


def run(*steps: int, broken: tuple[int, ...] = (), pinned: tuple[int, ...] = ()) -> list[Candidate]:
    """Checkpoints made one a day, step 100 now."""
    return [
        Candidate(f"step-{step}", step, 10, step not in broken, step * DAY, "for the paper" if step in pinned else None)
        for step in steps
    ]


def kept(candidates: list[Candidate], rules: KeepRules, **more: object) -> set[int]:
    reasons = reasons_to_keep(candidates, rules, now=NOW, **more)  # type: ignore[arg-type]
    return {candidate.step for candidate in candidates if reasons[candidate.name]}


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        (KeepRules(last=2), {90, 100}),
        (KeepRules(last=99), {60, 70, 80, 90, 100}),
        (KeepRules(every=40), {80, 100}),
        (KeepRules(within_seconds=20 * DAY), {80, 90, 100}),
        (KeepRules(last=2, every=30), {60, 90, 100}),
        (KeepRules(best=KeepBest("loss", 2)), {70, 80, 100}),
        (KeepRules(best=KeepBest("loss", 1, "max")), {60, 100}),
        (KeepRules(), {60, 70, 80, 90, 100}),
    ],
)
def test_rules_are_united_and_the_newest_stays(rules: KeepRules, steps: set[int]) -> None:
    loss = {60: 4.0, 70: 1.0, 80: 2.0, 90: 3.0}
    assert kept(run(60, 70, 80, 90, 100), rules, metric=loss) == steps


def test_only_complete_ones_count() -> None:
    assert kept(run(60, 70, 80, 90, 100, broken=(80, 100)), KeepRules(last=2)) == {70, 90}


def test_pinned_and_used_ones_stay_whatever_they_are() -> None:
    candidates = run(60, 70, 80, 90, 100, broken=(70,), pinned=(60, 70))
    reasons = reasons_to_keep(candidates, KeepRules(last=1), now=NOW, in_use=("step-80",))
    assert reasons["step-60"] == ["pinned: for the paper"]
    assert reasons["step-80"] == ["in use"]
    assert {name for name, why in reasons.items() if not why} == {"step-90"}


def test_an_unknown_age_is_no_reason_to_remove() -> None:
    candidates = [Candidate("step-1", 1, 10, True), *run(50, 100)]
    assert kept(candidates, KeepRules(within_seconds=DAY)) == {1, 100}


def test_of_equal_values_the_newer_is_the_better() -> None:
    assert kept(run(60, 70, 80, 100), KeepRules(best=KeepBest("loss", 1)), metric={60: 1.0, 70: 1.0, 80: 1.0}) == {
        80,
        100,
    }
    assert kept(run(60, 70, 80, 100), KeepRules(best=KeepBest("a", 1, "max")), metric={60: 1.0, 80: 1.0}) == {80, 100}


@pytest.mark.parametrize("rules", [KeepRules(last=-1), KeepRules(every=-5), KeepRules(best=KeepBest("loss", 1, "low"))])
def test_rules_that_mean_nothing_are_refused(rules: KeepRules) -> None:
    with pytest.raises(UsageError):
        rules.check()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), unique_by=lambda item: item[0], max_size=12),
    st.integers(0, 5),
    st.integers(0, 7),
    st.integers(0, 50),
)
def test_the_newest_complete_one_always_stays(
    items: list[tuple[int, bool, bool]], last: int, every: int, days: int
) -> None:
    candidates = [
        Candidate(f"step-{step}", step, 1, complete, step * DAY, "" if pinned else None)
        for step, complete, pinned in items
    ]
    rules = KeepRules(last, every, days * DAY)
    complete = sorted((c.step for c in candidates if c.complete), reverse=True)
    stays = kept(candidates, rules)
    assert set(complete[: max(1, last)]) <= stays
    assert {c.step for c in candidates if c.pinned is not None} <= stays
    assert all(step in stays for step in complete if every and step % every == 0)
    assert stays <= set(complete) | {c.step for c in candidates if c.pinned is not None}
