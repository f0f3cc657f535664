"""Who writes what of a state that ranks hold together: planned by the first rank, and kept while the state stays alike.

What a rank holds of an 8B model with AdamW, 1,200 boxes, takes 50 kB to tell. On 1,000 ranks that is 50 MB, which go to
the first rank alone and once; told to every rank before each save, they would stop the training's Python for seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.core.tensors import TensorEntry
from ckptool.ranks import Ranks


@dataclass(frozen=True)
class Description:
    """What the ranks of a training usually say alike: tensors, plain values, and where each is in the nested state."""

    entries: Mapping[str, TensorEntry]
    objects: tuple[str, ...]
    paths: Mapping[str, tuple[str | int, ...]]

    def fingerprint(self) -> str:
        """Equal for what is equal."""
        entries = sorted((fqn, entry.dtype, entry.shape) for fqn, entry in self.entries.items())
        return _hash((entries, sorted(self.objects), sorted(self.paths.items())))


@dataclass(frozen=True)
class Held:
    """What one rank has of a state, without its bytes: `boxes` are the regions of the tensors, by fqn."""

    description: Description
    boxes: Mapping[str, Box]


@dataclass(frozen=True)
class Share:
    """What one rank writes: its region of each of the tensors `fqns`, and the plain values `objects`."""

    fqns: tuple[str, ...]
    objects: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The whole state, and the share of each rank."""

    tensors: Mapping[str, TensorEntry]
    paths: Mapping[str, tuple[str | int, ...]]
    shares: list[Share]


class SavePlans:
    """The plans of one training's saves, on the ranks that make them together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._fingerprint = ""
        self._plan: Plan | None = None
        self._share = Share((), ())

    def of(self, held: Held, action: str) -> tuple[Share, Plan | None]:
        """What this rank writes; on the first rank, the plan too. All ranks call it.

        Raises DistributedError when a rank is gone.
        """
        described = held.description.fingerprint()
        boxes = sorted((fqn, box.offsets, box.sizes) for fqn, box in held.boxes.items())
        fingerprint = _hash((described, boxes))
        said = self._ranks.gather((fingerprint == self._fingerprint, described), action)
        if not all(is_known for is_known, _ in said):
            self._fingerprint = ""
            of_first = said[0][1]
            told = self._ranks.gather_on_first((None if described == of_first else held.description, boxes), action)
            self._plan = self._ranks.agree(action, lambda: _plan_of(held.description, told) if told else None)
            self._share = self._ranks.from_first(self._plan.shares if self._plan else [], action)
            self._fingerprint = fingerprint
        return self._share, self._plan


_Boxes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]


def _plan_of(of_first: Description, told: Sequence[tuple[Description | None, _Boxes]]) -> Plan:
    """From what each rank says: its description, None where it is that of the first, and its boxes."""
    return plan_saves(
        [Held(description or of_first, {fqn: Box(*box) for fqn, *box in boxes}) for description, boxes in told]
    )


def plan_saves(held: Sequence[Held]) -> Plan:
    """Of what several ranks hold, that one writes which has least to write so far."""
    tensors: dict[str, TensorEntry] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    writers_of_objects: dict[str, int] = {}
    described: Description | None = None
    for rank, part in enumerate(held):
        if part.description is not described:
            described = part.description
            tensors |= described.entries
            paths |= described.paths
            for fqn in described.objects:
                writers_of_objects.setdefault(fqn, rank)
        for fqn, box in part.boxes.items():
            if box.num_elements or not tensors[fqn].num_elements:
                holders.setdefault((fqn, box), []).append(rank)
    load_bytes = [0] * len(held)
    fqns: list[list[str]] = [[] for _ in held]
    for (fqn, box), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        writer = min(ranks, key=lambda rank: load_bytes[rank])
        load_bytes[writer] += box.num_elements * tensors[fqn].itemsize_bytes
        fqns[writer].append(fqn)
    objects: list[list[str]] = [[] for _ in held]
    for fqn, rank in writers_of_objects.items():
        objects[rank].append(fqn)
    shares = [Share(tuple(some), tuple(others)) for some, others in zip(fqns, objects, strict=True)]
    return Plan(tensors, paths, shares)


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
