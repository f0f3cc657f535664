"""What each rank of a mesh would read of a checkpoint as it is stored now, without writing anything."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.layout import Layout
from ckptool.core.mesh import Mesh, Placement, split
from ckptool.core.plan import Result
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.ops.layouts import read_layout
from ckptool.runs import resolve
from ckptool.storage.files import Place


def plan_reads(name: str, *, mesh: Mesh, root: Place | None = None, placements: Path | None = None) -> Result:
    """Say which bytes of checkpoint `name` each rank of `mesh` would read, and from which file.

    In `details`: `held_bytes`, what the ranks hold together, copies counted for each; `read_bytes`, what stock readers
    fetch for that, which take every stored chunk whole that they need a part of; `amplification`, the second by the
    first; and `ranks` with the same for each rank, its files in `files`. A tie counts once. Raises as
    `ops.reshard.reshard` does.
    """
    path = resolve(name, root)
    manifest = read_manifest(path)
    layout = read_layout(path, manifest, mesh, placements)
    held, read = _count(manifest, layout)
    ranks = [
        {"rank": rank, "held_bytes": held[rank], "read_bytes": sum(read[rank].values()), "files": dict(read[rank])}
        for rank in range(mesh.world_size)
    ]
    held_bytes, read_bytes = sum(held), sum(sum(files.values()) for files in read)
    details: dict[str, Any] = {
        "world_size": mesh.world_size,
        "mesh": mesh.to_json(),
        "held_bytes": held_bytes,
        "read_bytes": read_bytes,
        "amplification": round(read_bytes / held_bytes, 4) if held_bytes else 1.0,
        "ranks": ranks,
    }
    return Result("plan", str(path), details=details)


def _count(manifest: Manifest, layout: Layout) -> tuple[list[int], list[Counter[str]]]:
    """Per rank, the bytes that it holds and those that it reads, by file: payload, without the archives around it."""
    held = [0] * layout.mesh.world_size
    read: list[Counter[str]] = [Counter() for _ in held]
    for fqn, entry in manifest.tensors.items():
        if fqn in manifest.ties:
            continue
        chunks = [chunk for chunk in entry.chunks if chunk.locator is not None and chunk.box.num_elements]
        boxes = tuple(chunk.box for chunk in chunks)
        for ranks, num_elements, needed in _needed(entry.shape, boxes, layout.mesh, layout.placements[fqn]):
            files: Counter[str] = Counter()
            for i in needed:
                files[chunks[i].locator.file] += boxes[i].num_elements * entry.itemsize_bytes  # type: ignore[union-attr]
            for rank in ranks:
                held[rank] += num_elements * entry.itemsize_bytes
                read[rank].update(files)
    return held, read


@functools.lru_cache(maxsize=64)
def _needed(
    shape: tuple[int, ...], chunks: tuple[Box, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> list[tuple[tuple[int, ...], int, list[int]]]:
    """(ranks, elements that each of them holds, numbers of the chunks that it needs, once for each of its boxes)."""
    return [
        (
            held.ranks,
            sum(box.num_elements for box in held.boxes),
            [i for box in held.boxes for i, chunk in enumerate(chunks) if box.intersect(chunk) is not None],
        )
        for held in split(shape, mesh, placements)
    ]
