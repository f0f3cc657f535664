"""From a manifest and a naming to a Plan: every name accounted for, every byte counted, nothing read or written."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.dtypes import CASTABLE
from ckptool.core.moves import Move, Moves, runs_in_order
from ckptool.core.parts import Part, PlanItem, Transform, one_part
from ckptool.core.plan import BATCH_BYTES, PIECES_IN_FLIGHT, Plan, pieces
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan

#: (fqn, dtype, shape, max chunk bytes) -> the target with its chunks; `core.cuts` has the two rules.
Cut = Callable[[str, str, tuple[int, ...], int], TensorEntry]

#: What the engine's buffers may take together unless more is asked for, and how many workers that is at most.
DEFAULT_MEMORY_BYTES = 192 << 20
MAX_WORKERS = 64

#: A worker's output file fills one buffer while another is written (storage.direct_file).
FILE_BUFFER_BYTES = 8 << 20


def plan_conversion(
    verb: str,
    source: Manifest,
    names: NamePlan,
    target: str,
    *,
    cut: Cut,
    piece_bytes: int,
    lay_out: Callable[[list[PlanItem]], list[Part]] = one_part,
    source_prefix: str = "",
    target_prefix: str = "",
    extra_disk_bytes: int = 0,
    chunk_overhead_bytes: int = 0,
    num_workers: int | None = None,
    memory_bytes: int | None = None,
) -> Plan:
    """Plan `names` over the tensors of `source`; prefixes are put before the naming's own names.

    `lay_out` distributes the items over files. `chunk_overhead_bytes` is what the target format adds to each chunk,
    `extra_disk_bytes` what lies beside them. `num_workers` (default: one a core, as many as `memory_bytes` allow) is
    how many files are written at a time. Raises MismatchError when two groups make one target or take one source,
    UnsupportedError for a group whose tensors have several dtypes.
    """
    _check_used_once(names)
    make = functools.partial(_items, source, cut, piece_bytes, source_prefix, target_prefix)
    items = [item for group in names.groups for item in make(group)]
    write_bytes = sum(item.write_bytes for item in items)
    num_chunks = sum(len(entry.chunks) for item in items for entry in item.targets)
    parts = tuple(lay_out(items))
    memory_bytes = memory_bytes or DEFAULT_MEMORY_BYTES
    # Small pieces come in batches, as they are stored and as they are cast.
    batch_bytes = 2 * PIECES_IN_FLIGHT * min(BATCH_BYTES, write_bytes)
    worker_bytes = max([batch_bytes, *(_stream_bytes(source, item) for item in items)]) + FILE_BUFFER_BYTES
    num_workers = num_workers or min(usable_cores(), MAX_WORKERS, max(1, memory_bytes // worker_bytes))
    num_workers = max(1, min(num_workers, len(parts)))
    groups = [group_bytes(item, source) for item in items if item.transform is not None]
    return Plan(
        verb=verb,
        source=source.location,
        target=target,
        parts=parts,
        read_bytes=sum(_read_bytes(source, item) for item in items),
        write_bytes=write_bytes,
        peak_bytes=num_workers * worker_bytes + max([0, *groups, min(memory_bytes, num_workers * max([0, *groups]))]),
        disk_bytes=write_bytes + num_chunks * chunk_overhead_bytes + extra_disk_bytes,
        notes=tuple(names.notes),
        num_workers=num_workers,
        memory_bytes=memory_bytes,
    )


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_used_once(names: NamePlan) -> None:
    for what, all_names in (
        ("would be made twice", [name for group in names.groups for name in group.targets]),
        ("would be used twice", [name for group in names.groups for name in group.sources]),
    ):
        if len(set(all_names)) != len(all_names):
            seen: set[str] = set()
            twice = {name for name in all_names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
            raise MismatchError(f"tensors {what}: {name_some(twice)}")


def _items(
    source: Manifest, cut: Cut, piece_bytes: int, source_prefix: str, target_prefix: str, group: NameGroup
) -> list[PlanItem]:
    """One item a target where the group only moves elements, which then are never in memory as a whole; else one."""
    fqns = tuple(source_prefix + name for name in group.sources)
    dtypes = {cast_dtype(source.tensors[fqn].dtype, group.cast) for fqn in fqns}
    if len(dtypes) != 1:
        raise UnsupportedError(f"{name_some(list(fqns))} make one tensor but have dtypes {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()
    targets = tuple(cut(target_prefix + name, dtype, shape, piece_bytes) for name, shape in group.targets.items())
    transform = _prefixed(group, source_prefix, target_prefix)
    if transform is None:
        return [PlanItem(fqns, targets, None, group.label)]
    moves = _moves(source, fqns, targets, transform)
    if moves is None:
        return [PlanItem(fqns, targets, transform, group.label)]
    return [
        PlanItem(made.sources, (entry,), None, group.label, made) for entry, made in zip(targets, moves, strict=True)
    ]


def _moves(
    source: Manifest, fqns: tuple[str, ...], targets: tuple[TensorEntry, ...], transform: Transform
) -> list[Moves] | None:
    """The moves that make each target, when that is all that `transform` does and each is a run that can be read."""
    from ckptool.naming.moves import find_moves

    found = find_moves(transform, {fqn: source.tensors[fqn] for fqn in fqns})
    if found is None or any(not chunk.box.is_contiguous_in(entry.shape) for entry in targets for chunk in entry.chunks):
        return None
    in_order = [runs_in_order(found.get(entry.fqn, ()), entry.shape) for entry in targets]
    all_moves = [moves for moves in in_order if moves is not None]
    if len(all_moves) < len(targets):
        return None
    readable = all(_can_be_read(source, move) for moves in all_moves for move in moves.moves)
    return all_moves if readable else None


def _can_be_read(source: Manifest, move: Move) -> bool:
    shape = source.tensors[move.source].shape
    is_rows = move.source_box.sizes[1:] == shape[1:]
    return move.source_box.is_contiguous_in(shape) and (is_rows or not source.whole_rows)


def cast_dtype(stored: str, wanted: str | None) -> str:
    """The dtype after a cast: only floats are cast, integers, booleans and scaled formats keep theirs."""
    return wanted if wanted in CASTABLE and stored in CASTABLE else stored


def _prefixed(group: NameGroup, source_prefix: str, target_prefix: str) -> Callable | None:
    inner = group.transform
    if inner is None:
        return None

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        made = inner({fqn.removeprefix(source_prefix): tensor for fqn, tensor in tensors.items()})
        return {target_prefix + name: tensor for name, tensor in made.items()}

    return transform


def group_bytes(item: PlanItem, source: Manifest) -> int:
    """The most memory that the conversion of a group takes: what is read, once more while it is cast, what is made."""
    read = sum(source.tensors[fqn].num_bytes for fqn in item.sources)
    return 2 * read + sum(entry.num_bytes for entry in item.targets)


def _read_bytes(source: Manifest, item: PlanItem) -> int:
    if item.moves is None:
        return sum(source.tensors[fqn].num_bytes for fqn in item.sources)
    return sum(source.tensors[m.source].itemsize_bytes * m.box.num_elements for m in item.moves.moves)


def _stream_bytes(source: Manifest, item: PlanItem) -> int:
    """A worker's buffers while it streams an item: the pieces in flight, as they are stored and as they are cast."""
    if item.transform is not None:
        return 0
    entry, stored = item.targets[0], [source.tensors[fqn] for fqn in item.sources]
    boxes = {m.source_box.sizes for m in item.moves.moves} if item.moves else {c.box.sizes for c in entry.chunks}
    firsts = (next(pieces(Box.whole(sizes), entry.itemsize_bytes, source.whole_rows)) for sizes in boxes)
    largest = max((piece.num_elements for piece in firsts), default=0)
    casting = any(one.dtype != entry.dtype for one in stored)
    widest = max(one.itemsize_bytes for one in stored)
    return PIECES_IN_FLIGHT * largest * (widest + (entry.itemsize_bytes if casting else 0))
