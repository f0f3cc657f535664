"""The work of a conversion: items, the parts they are done in, and the record of a part that is done.

A part is the whole content of a file, or of a few. Workers and ranks share parts out among them, and a conversion that
was killed need not do a recorded one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.box import Box
from ckptool.core.moves import Moves
from ckptool.core.tensors import Chunk, Locator, TensorEntry

#: {source fqn: tensor} -> {target fqn: tensor}; the tensors are torch's, which core doesn't import.
Transform = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class PlanItem:
    """One unit of work: read `sources`, give `targets`.

    Without a `transform` there is one target, and the engine streams its chunks, casting when the dtypes differ:
    `moves` says of which sources; without it there is one, of the same shape. With a transform the engine reads the
    whole group, casts it to the targets' dtype, and calls `transform({source fqn: tensor}) -> {target fqn: tensor}`.
    """

    sources: tuple[str, ...]
    targets: tuple[TensorEntry, ...]
    transform: Transform | None = None
    label: str = "copy"
    moves: Moves | None = None

    @property
    def write_bytes(self) -> int:
        return sum(chunk.box.num_elements * entry.itemsize_bytes for entry in self.targets for chunk in entry.chunks)


@dataclass(frozen=True)
class Part:
    """Items, and objects by fqn, that make up the whole content of `files`, which no other part writes to.

    With several files the sink knows what goes where.
    """

    files: tuple[str, ...]
    items: tuple[PlanItem, ...]
    objects: tuple[str, ...] = ()

    @property
    def write_bytes(self) -> int:
        return sum(item.write_bytes for item in self.items)


@dataclass(frozen=True)
class FileRecord:
    """A file that is safe on the disk: its size and the BLAKE3 of its content, in hex.

    `chunks` and `objects` say where in it things lie, for formats that keep such a list; `digests` are the sums of
    tensor digests over it, as text.
    """

    file: str
    num_bytes: int
    blake3: str
    chunks: Mapping[str, Sequence[Chunk]] = field(default_factory=dict)
    objects: Mapping[str, Locator] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "bytes": self.num_bytes,
            "blake3": self.blake3,
            "chunks": {fqn: [_chunk_to_json(chunk) for chunk in chunks] for fqn, chunks in self.chunks.items()},
            "objects": {fqn: _locator_to_json(locator) for fqn, locator in self.objects.items()},
            "digests": dict(self.digests),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> FileRecord:
        """Raises KeyError, TypeError or ValueError for what `to_json` didn't make."""
        return cls(
            file=str(record["file"]),
            num_bytes=int(record["bytes"]),
            blake3=str(record["blake3"]),
            chunks={fqn: tuple(_chunk_from_json(c) for c in chunks) for fqn, chunks in record["chunks"].items()},
            objects={fqn: Locator(*locator) for fqn, locator in record["objects"].items()},
            digests=dict(record["digests"]),
        )


def one_part(items: Iterable[PlanItem], file: str = "") -> list[Part]:
    """Everything in one file, or, without a name, in none: a plan that is not for writing."""
    return [Part((file,), tuple(items))]


def pack(items: Iterable[PlanItem], max_bytes: int) -> list[list[PlanItem]]:
    """Cut a list of items, in its order, where one more would make a piece larger than `max_bytes`."""
    packs: list[list[PlanItem]] = []
    used_bytes = 0
    for item in items:
        if not packs or used_bytes + item.write_bytes > max_bytes:
            packs.append([])
            used_bytes = 0
        packs[-1].append(item)
        used_bytes += item.write_bytes
    return packs


def _chunk_to_json(chunk: Chunk) -> list[Any]:
    locator = _locator_to_json(chunk.locator) if chunk.locator else None
    return [list(chunk.box.offsets), list(chunk.box.sizes), locator]


def _chunk_from_json(record: list[Any]) -> Chunk:
    offsets, sizes, locator = record
    return Chunk(Box(tuple(offsets), tuple(sizes)), Locator(*locator) if locator else None)


def _locator_to_json(locator: Locator) -> list[Any]:
    return [locator.file, locator.offset, locator.length]
