"""Which steps survived, and which data they trained, from the logs that the trainer writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_lines(path: Path) -> list[Record]:
    """The records of a JSON-lines file; a last line that a killed process left half-written is no record."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def surviving(records: Sequence[Record]) -> list[Record]:
    """The steps that the last state descends from, in order.

    A run that resumes goes back to the step after its checkpoint: from there on, its lines replace the earlier ones.
    """
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def faults(lineage: Sequence[Record], consumed: int) -> list[str]:
    """Why the lineage did not train units 0 .. consumed-1 exactly once each, in steps 1, 2, 3, ...; [] when it did."""
    found = []
    steps = [record["step"] for record in lineage]
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"the steps are {steps}, not 1, 2, 3, ...")
    times = Counter(unit for record in lineage for unit in record["units"])
    repeated = sorted(unit for unit, count in times.items() if count > 1)
    missing = sorted(set(range(consumed)) - set(times))
    strange = sorted(set(times) - set(range(consumed)))
    for what, units in (("repeated", repeated), ("missing", missing), ("beyond the recorded position", strange)):
        if units:
            found.append(f"{what}: {units}")
    return found


def by_world_size(lineage: Sequence[Record]) -> list[str]:
    """`steps 1-4 on 2 ranks` for each stretch of the lineage."""
    stretches = [(size, list(lines)) for size, lines in groupby(lineage, key=lambda record: record["world_size"])]
    return [
        f"steps {lines[0]['step']}-{lines[-1]['step']} on {size} rank{'s' if size > 1 else ''}"
        for size, lines in stretches
    ]
