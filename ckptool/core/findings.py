"""What `verify` finds wrong, as data: a kind, a place, a sentence, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["missing", "truncated", "corrupt", "overlapping", "unexpected", "mismatched", "not-finite"]

#: Exit code 4 means the checkpoint's bytes are damaged, 3 that it differs from what it is compared with.
_DAMAGE: frozenset[str] = frozenset({"missing", "truncated", "corrupt", "overlapping", "unexpected"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `offset_bytes` is the place in `file`; -1 when there is none."""

    kind: Kind
    message: str
    tensor: str = ""
    file: str = ""
    offset_bytes: int = -1
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def exit_code(findings: Sequence[Finding]) -> int:
    """4 when anything is damaged, else 3 when anything differs, else 0."""
    if any(finding.kind in _DAMAGE for finding in findings):
        return 4
    return 3 if findings else 0
