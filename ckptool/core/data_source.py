"""DataSource: a set of training data as the order of units sees it: how many units, and which data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: What a unit is: `window` (seq_len tokens of the concatenated documents), `ffd-block` (a row of seq_len tokens packed
#: with whole documents), `document` (one document).
UNIT_KINDS = ("window", "ffd-block", "document")


@dataclass(frozen=True)
class DataSource:
    """`num_units` units, numbered from 0, under a `name` that is unique in its mixture and keys the order.

    Equal fingerprints mean equal tokens in equal units: whatever changes them must be in `fingerprint` (ordered files,
    rows, tokenizer, packing), as flat strings and integers, so that a difference can be shown entry by entry.
    """

    name: str
    num_units: int
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)
    unit_kind: str = "window"

    def described(self) -> dict[str, str | int]:
        """All of it but the name, flat: what two sources of one name are compared by."""
        return {"num_units": self.num_units, "unit_kind": self.unit_kind, **dict(sorted(self.fingerprint.items()))}
