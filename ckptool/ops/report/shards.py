"""Which rank and file hold which part of which tensor: counted by file and layer, and listed part by part."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.ops.diff import layer_of

#: The map has at most so many rows and columns: more layers, or more files, share one.
MAX_LAYERS = 80
MAX_FILES = 64
#: Parts that are listed one by one.
MAX_PARTS = 1000
_NAMED_PARTS = 3
_RANK_FILE = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class FileShare:
    """What one file holds. `rank` is None for files that don't say who wrote them."""

    file: str
    rank: int | None
    num_bytes: int
    num_chunks: int
    num_tensors: int


@dataclass(frozen=True)
class Part:
    """A stored part of a tensor; `rows` is like `[0:128, 0:64]`, offsets and bytes are of the file."""

    fqn: str
    rows: str
    file: str
    rank: int | None
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class Cell:
    """What the files of one column hold of the layers of one row. `parts` names some of it."""

    layers: str
    files: str
    num_bytes: int
    num_chunks: int
    parts: str


@dataclass(frozen=True)
class ShardMap:
    """`layers` and `files` are the rows and columns of the map, in the checkpoint's order and by rank."""

    files: tuple[FileShare, ...]
    cells: tuple[Cell, ...]
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    parts: tuple[Part, ...]
    num_parts: int

    @property
    def imbalance(self) -> float | None:
        """Bytes of the fullest rank over the mean of all; None when no file names its rank."""
        loads: dict[int, int] = defaultdict(int)
        for share in self.files:
            if share.rank is not None:
                loads[share.rank] += share.num_bytes
        total = sum(loads.values())
        return max(loads.values()) * len(loads) / total if total else None


def map_shards(manifest: Manifest, keys: str = "*") -> ShardMap:
    """Count the stored chunks, those of a tie once. Parts are listed of the tensors that match `keys`."""
    stored = [(entry, chunk) for entry, chunk in _stored(manifest) if chunk.locator]
    files = sorted({_file(chunk) for _, chunk in stored}, key=lambda file: (_order(rank_of(file)), file))
    layers = list(dict.fromkeys(layer_of(entry.fqn) for entry, _ in stored))
    rows, row_names = _bands(layers, MAX_LAYERS)
    columns, column_names = _bands(files, MAX_FILES)
    inside: dict[tuple[int, int], list[tuple[TensorEntry, Chunk]]] = defaultdict(list)
    for entry, chunk in stored:
        inside[rows[layer_of(entry.fqn)], columns[_file(chunk)]].append((entry, chunk))
    listed = [(entry, chunk) for entry, chunk in stored if fnmatch.fnmatchcase(entry.fqn, keys)]
    return ShardMap(
        files=tuple(_shares(stored, files)),
        cells=tuple(_cell(row_names[row], column_names[column], held) for (row, column), held in inside.items()),
        row_names=tuple(row_names),
        column_names=tuple(column_names),
        parts=tuple(_part(entry, chunk) for entry, chunk in listed[:MAX_PARTS]),
        num_parts=len(listed),
    )


def rank_of(file: str) -> int | None:
    """`__3_0.distcp` -> 3: the rank that DCP puts into a file's name."""
    match = _RANK_FILE.fullmatch(file)
    return int(match[1]) if match and len(match[1]) < 10 else None


def _stored(manifest: Manifest) -> Iterator[tuple[TensorEntry, Chunk]]:
    for fqn, entry in manifest.tensors.items():
        if fqn not in manifest.ties:
            yield from ((entry, chunk) for chunk in entry.chunks)


def _file(chunk: Chunk) -> str:
    return chunk.locator.file if chunk.locator else ""


def _order(rank: int | None) -> float:
    return float("inf") if rank is None else rank


def _bands(names: Sequence[str], limit: int) -> tuple[dict[str, int], list[str]]:
    """Neighbours share a band when there are more than `limit`. Returns name -> band, and what each band is called."""
    width = -(-len(names) // limit) or 1
    bands = [names[start : start + width] for start in range(0, len(names), width)]
    titles = [band[0] if len(band) == 1 else f"{band[0]} … {band[-1]}" for band in bands]
    return {name: number for number, band in enumerate(bands) for name in band}, titles


def _shares(stored: Sequence[tuple[TensorEntry, Chunk]], files: Sequence[str]) -> Iterator[FileShare]:
    held: dict[str, list[tuple[TensorEntry, Chunk]]] = defaultdict(list)
    for entry, chunk in stored:
        held[_file(chunk)].append((entry, chunk))
    for file in files:
        num_bytes = sum(_num_bytes(entry, chunk) for entry, chunk in held[file])
        yield FileShare(file, rank_of(file), num_bytes, len(held[file]), len({entry.fqn for entry, _ in held[file]}))


def _cell(layers: str, files: str, held: Sequence[tuple[TensorEntry, Chunk]]) -> Cell:
    named = [f"{part.fqn} {part.rows}" for part in (_part(*item) for item in held[:_NAMED_PARTS])]
    if len(held) > _NAMED_PARTS:
        named.append(f"and {len(held) - _NAMED_PARTS} more")
    return Cell(layers, files, sum(_num_bytes(*item) for item in held), len(held), "; ".join(named))


def _part(entry: TensorEntry, chunk: Chunk) -> Part:
    box, file = chunk.box, _file(chunk)
    rows = ", ".join(f"{start}:{end}" for start, end in zip(box.offsets, box.ends, strict=True))
    offset_bytes = chunk.locator.offset if chunk.locator else 0
    return Part(entry.fqn, f"[{rows}]", file, rank_of(file), offset_bytes, _num_bytes(entry, chunk))


def _num_bytes(entry: TensorEntry, chunk: Chunk) -> int:
    return chunk.box.num_elements * entry.itemsize_bytes
