"""DataSource: a set of training data as the order of units sees it: how many units, and which data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    @classmethod
    def from_record(cls, record: Any) -> DataSource:
        """A source from parsed JSON: `name`, `num_units`, `fingerprint`, and `unit_kind` unless it is `window`.

        Raises ValueError for anything else.
        """
        known = {"name", "num_units", "fingerprint", "unit_kind"}
        if type(record) is not dict or not {"name", "num_units", "fingerprint"} <= set(record) <= known:
            raise ValueError("a source has a name, num_units and a fingerprint")
        name, num_units, fingerprint = record["name"], record["num_units"], record["fingerprint"]
        unit_kind = record.get("unit_kind", "window")
        if type(name) is not str or not name or unit_kind not in UNIT_KINDS:
            raise ValueError(f"a source with the name {name!r:.80} and units of kind {unit_kind!r:.80}")
        if type(num_units) is not int or not 1 <= num_units < 1 << 63:
            raise ValueError(f"{num_units!r:.80} is no number of units")
        if type(fingerprint) is not dict or not {type(value) for value in fingerprint.values()} <= {str, int}:
            raise ValueError("a fingerprint holds strings and integers")
        return cls(name, num_units, dict(fingerprint), unit_kind)

    def described(self) -> dict[str, str | int]:
        """All of it but the name, flat: what two sources of one name are compared by."""
        return {"num_units": self.num_units, "unit_kind": self.unit_kind, **dict(sorted(self.fingerprint.items()))}
