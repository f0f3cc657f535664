"""A Plan says all that a command will do before it does any of it; a Result says what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.tensors import TensorEntry

#: How many boxes the engine holds at once: one being written, the others read ahead.
PIECES_IN_FLIGHT = 3

#: {source fqn: tensor} -> {target fqn: tensor}; the tensors are torch's, which core doesn't import.
Transform = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class PlanItem:
    """One unit of work: read `sources`, give `targets`.

    Without a `transform` there is one source and one target of the same shape, and the engine streams it box by box,
    casting when the dtypes differ. With one, the engine reads the whole group, casts it to the targets' dtype, and
    calls `transform({source fqn: tensor}) -> {target fqn: tensor}`.
    """

    sources: tuple[str, ...]
    targets: tuple[TensorEntry, ...]
    transform: Transform | None = None
    label: str = "copy"


@dataclass(frozen=True)
class Plan:
    """What will be read, written and needed. Bytes are tensor payload; `peak_bytes` is the engine's buffers."""

    verb: str
    source: str
    target: str
    items: tuple[PlanItem, ...]
    read_bytes: int
    write_bytes: int
    peak_bytes: int
    disk_bytes: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "verb": self.verb,
            "source": self.source,
            "target": self.target,
            "num_tensors": sum(len(item.targets) for item in self.items),
            "num_chunks": sum(len(t.chunks) for item in self.items for t in item.targets),
            "num_transformed": sum(len(item.targets) for item in self.items if item.transform is not None),
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "peak_bytes": self.peak_bytes,
            "disk_bytes": self.disk_bytes,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Result:
    """What a command did. `plan` is None for commands that only look."""

    verb: str
    target: str
    plan: Plan | None = None
    executed: bool = True
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "verb": self.verb,
            "target": self.target,
            "executed": self.executed,
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "plan": self.plan.to_json() if self.plan else None,
            **self.details,
        }
