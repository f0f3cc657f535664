"""The demo's proof must fail when it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import load_script

lineage = load_script("docs/demo/lineage.py")


def step(number: int, *units: int, world_size: int = 1) -> dict[str, Any]:
    return {"step": number, "units": list(units), "world_size": world_size}


KILLED_AND_RESUMED = [step(1, 0, 1), step(2, 2, 3), step(3, 4, 5), step(2, 2, 3), step(3, 4, 5), step(4, 6, 7)]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint() -> None:
    kept = lineage.surviving(KILLED_AND_RESUMED)
    assert [record["step"] for record in kept] == [1, 2, 3, 4]
    assert kept[1] is KILLED_AND_RESUMED[3]
    assert lineage.faults(kept, consumed=8) == []


@pytest.mark.parametrize(
    ("records", "consumed", "word"),
    [
        ([step(1, 0, 1), step(2, 1, 2)], 3, "repeated: [1]"),
        ([step(1, 0, 1), step(2, 3, 4)], 5, "missing: [2]"),
        ([step(1, 0, 1), step(2, 2, 3)], 3, "beyond the recorded position: [3]"),
        ([step(1, 0, 1), step(3, 2, 3)], 4, "the steps are [1, 3]"),
        ([], 2, "missing: [0, 1]"),
    ],
)
def test_each_way_to_break_the_promise_is_found(records: list[Any], consumed: int, word: str) -> None:
    assert any(word in fault for fault in lineage.faults(records, consumed))


def test_stretches_are_told_by_world_size() -> None:
    records = [step(1, world_size=2), step(2, world_size=2), step(3, world_size=1)]
    assert lineage.by_world_size(records) == ["steps 1-2 on 2 ranks", "steps 3-3 on 1 rank"]


def test_a_half_written_last_line_is_no_record(tmp_path: Path) -> None:
    log = tmp_path / "samples.jsonl"
    log.write_text('{"step": 1, "units": [0]}\n{"step": 2, "un')
    assert lineage.read_lines(log) == [{"step": 1, "units": [0]}]
