"""From a manifest and a naming to a Plan: every name accounted for, every byte counted, nothing read or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptool.core.checkpoint import Manifest
from ckptool.core.dtypes import CASTABLE
from ckptool.core.plan import PIECES_IN_FLIGHT, Plan, PlanItem
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan

#: (fqn, dtype, shape, max piece bytes) -> the target with its chunks; `core.cuts` has the two rules.
Cut = Callable[[str, str, tuple[int, ...], int], TensorEntry]


def plan_conversion(
    verb: str,
    source: Manifest,
    names: NamePlan,
    target: str,
    *,
    cut: Cut,
    piece_bytes: int,
    source_prefix: str = "",
    target_prefix: str = "",
    extra_disk_bytes: int = 0,
    chunk_overhead_bytes: int = 0,
) -> Plan:
    """Plan `names` over the tensors of `source`; prefixes are put before the naming's own names.

    `chunk_overhead_bytes` is what the target format adds to each chunk, `extra_disk_bytes` what lies beside them.
    Raises MismatchError when two groups make one target or take one source, UnsupportedError for a group whose tensors
    have several dtypes.
    """
    _check_used_once(names)
    items = tuple(_item(source, group, cut, piece_bytes, source_prefix, target_prefix) for group in names.groups)
    written = [entry for item in items for entry in item.targets]
    write_bytes = sum(entry.num_bytes for entry in written)
    num_chunks = sum(len(entry.chunks) for entry in written)
    return Plan(
        verb=verb,
        source=source.location,
        target=target,
        items=items,
        read_bytes=sum(source.tensors[fqn].num_bytes for item in items for fqn in item.sources),
        write_bytes=write_bytes,
        peak_bytes=max((_item_peak_bytes(source, item) for item in items), default=0),
        disk_bytes=write_bytes + num_chunks * chunk_overhead_bytes + extra_disk_bytes,
        notes=tuple(names.notes),
    )


def _check_used_once(names: NamePlan) -> None:
    for what, all_names in (
        ("would be made twice", [name for group in names.groups for name in group.targets]),
        ("would be used twice", [name for group in names.groups for name in group.sources]),
    ):
        if len(set(all_names)) != len(all_names):
            seen: set[str] = set()
            twice = {name for name in all_names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
            raise MismatchError(f"tensors {what}: {name_some(twice)}")


def _item(
    source: Manifest, group: NameGroup, cut: Cut, piece_bytes: int, source_prefix: str, target_prefix: str
) -> PlanItem:
    fqns = tuple(source_prefix + name for name in group.sources)
    dtypes = {cast_dtype(source.tensors[fqn].dtype, group.cast) for fqn in fqns}
    if len(dtypes) != 1:
        raise UnsupportedError(f"{name_some(list(fqns))} make one tensor but have dtypes {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()
    targets = tuple(cut(target_prefix + name, dtype, shape, piece_bytes) for name, shape in group.targets.items())
    return PlanItem(fqns, targets, _prefixed(group, source_prefix, target_prefix), group.label)


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


def _item_peak_bytes(source: Manifest, item: PlanItem) -> int:
    """The engine's buffers for one item: the pieces in flight, or a transform's whole group, in and out."""
    if item.transform is not None:
        read = sum(source.tensors[fqn].num_bytes for fqn in item.sources)
        return 2 * read + sum(entry.num_bytes for entry in item.targets)
    entry = item.targets[0]
    largest = max(chunk.box.num_elements for chunk in entry.chunks)
    read_itemsize = source.tensors[item.sources[0]].itemsize_bytes
    casting = source.tensors[item.sources[0]].dtype != entry.dtype
    return PIECES_IN_FLIGHT * largest * (read_itemsize + (entry.itemsize_bytes if casting else 0))
