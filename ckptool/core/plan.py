"""A Plan says all that a command will do before it does any of it; a Result says what was done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.box import Box
from ckptool.core.parts import Part, PlanItem

#: The engine moves bytes in pieces of at most this size, or of one row where a row is larger.
PIECE_BYTES = 8 << 20


def pieces(box: Box, itemsize_bytes: int, whole_rows: bool) -> Iterator[Box]:
    """Cut a stored box into the pieces in which it is moved, in C order."""
    max_elements = PIECE_BYTES // itemsize_bytes
    if whole_rows and box.sizes:
        return iter(box.split_rows(max(1, max_elements // max(1, box.num_elements // max(1, box.sizes[0])))))
    return box.split(max_elements)


def item_pieces(item: PlanItem, box: Box, whole_rows: bool) -> Iterator[tuple[Box, str, Box]]:
    """The pieces in which a stored box of an item without a transform is moved: each with its source, and where it is
    there."""
    itemsize_bytes = item.targets[0].itemsize_bytes
    if item.moves is not None:
        return item.moves.pieces(box, lambda part: pieces(part, itemsize_bytes, whole_rows))
    (source,) = item.sources
    return ((piece, source, piece) for piece in pieces(box, itemsize_bytes, whole_rows))


#: Smaller pieces are read together, up to this many bytes.
BATCH_BYTES = 2 << 20

#: How many pieces, or batches of them, a worker holds at once: one being written, the others read ahead.
PIECES_IN_FLIGHT = 3


@dataclass(frozen=True)
class Plan:
    """What will be read, written and needed. Bytes are tensor payload.

    `peak_bytes` is the most memory that the engine's buffers take, with `num_workers` parts in work at a time;
    `memory_bytes` what they should take, which only a single large group of tensors may exceed.
    """

    verb: str
    source: str
    target: str
    parts: tuple[Part, ...]
    read_bytes: int
    write_bytes: int
    peak_bytes: int
    disk_bytes: int
    notes: tuple[str, ...] = ()
    num_workers: int = 1
    memory_bytes: int = 0

    @property
    def items(self) -> Iterator[PlanItem]:
        """The items of all parts, in order."""
        return (item for part in self.parts for item in part.items)

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints under `plan`."""
        return {
            "verb": self.verb,
            "source": self.source,
            "target": self.target,
            "num_files": len(self.parts),
            "num_tensors": sum(len(item.targets) for item in self.items),
            "num_chunks": sum(len(t.chunks) for item in self.items for t in item.targets),
            "num_transformed": sum(len(item.targets) for item in self.items if item.transform or item.moves),
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "num_workers": self.num_workers,
            "peak_bytes": self.peak_bytes,
            "disk_bytes": self.disk_bytes,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Result:
    """What a command did. `plan` is None for commands that only look.

    `target` is what it wrote or looked at; `details` has the fields of the command in docs/reference/json.md, sizes in
    bytes and times in seconds.
    """

    verb: str
    target: str
    plan: Plan | None = None
    executed: bool = True
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints, without the version."""
        return {
            "verb": self.verb,
            "target": self.target,
            "executed": self.executed,
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "plan": self.plan.to_json() if self.plan else None,
            **self.details,
        }
