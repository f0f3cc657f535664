"""Two checkpoints side by side: which tensors have a counterpart, and where their bytes first differ."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import Source
from ckptool.formats.dcp_metadata import MODEL_PREFIX
from ckptool.formats.dcp_source import DcpSource
from ckptool.ops.blocks import BLOCK_BYTES, blocks
from ckptool.storage.fetch_ahead import FetchAhead


@dataclass(frozen=True)
class Pairs:
    """Names of tensors and objects in one, in the other, in both. `both` leaves out ties that both sides have."""

    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    both: tuple[str, ...]
    objects: tuple[str, ...]


def pair_up(one: Manifest, other: Manifest, keys: str = "*", model_only: bool = False) -> Pairs:
    """Match tensors and objects by name. `model_only` looks at `model.*` alone.

    A tie that only one side lists is no difference as long as the other has the tensor it shares its bytes with.
    """
    names, others = _names(one, keys, model_only), _names(other, keys, model_only)
    objects = set(one.objects) & set(other.objects)
    both = names & others
    tied_twice = {fqn for fqn in both if one.ties.get(fqn, fqn) == other.ties.get(fqn, "") and fqn in one.ties}
    return Pairs(
        only_one=tuple(sorted(fqn for fqn in names - others if one.ties.get(fqn) not in other.tensors)),
        only_other=tuple(sorted(fqn for fqn in others - names if other.ties.get(fqn) not in one.tensors)),
        both=tuple(fqn for fqn in one.tensors if fqn in both and fqn in other.tensors and fqn not in tied_twice),
        objects=tuple(sorted(both & objects)),
    )


def _names(manifest: Manifest, keys: str, model_only: bool) -> set[str]:
    return {
        fqn
        for fqn in (*manifest.tensors, *manifest.objects)
        if fnmatch.fnmatchcase(fqn, keys) and (not model_only or fqn.startswith(MODEL_PREFIX))
    }


def read_pairs(one: Source, other: Source, fqn: str) -> Iterator[tuple[Box, memoryview, memoryview]]:
    """The pieces of a tensor that both hold in the same shape, in C order; valid until the next is asked for."""
    entry, counterpart = one.manifest.tensors[fqn], other.manifest.tensors[fqn]
    widths = entry.itemsize_bytes, counterpart.itemsize_bytes
    max_elements = max(1, min(BLOCK_BYTES // max(widths), entry.num_elements))
    first, second = (memoryview(bytearray(max_elements * width)) for width in widths)
    boxes = list(blocks(entry.shape, max_elements))
    with FetchAhead([*one.ranges(fqn, box), *other.ranges(fqn, box)] for box in boxes) as ahead:
        for box in boxes:
            here, there = first[: box.num_elements * widths[0]], second[: box.num_elements * widths[1]]
            one.read_into(fqn, box, here)
            other.read_into(fqn, box, there)
            ahead.passed()
            yield box, here, there


def same_bytes(one: memoryview, other: memoryview) -> bool:
    import numpy as np

    # Comparing memoryviews themselves goes element by element.
    return len(one) == len(other) and bool(np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)))


def first_difference(one: memoryview, other: memoryview, itemsize_bytes: int) -> int:
    """Index of the first element whose bytes differ, of two equally long pieces that do differ."""
    import numpy as np

    differ = np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)
    return int(differ.argmax()) // itemsize_bytes


def element_position(box: Box, index: int) -> list[int]:
    """Where element `index` of a box's elements in C order lies in its tensor."""
    place = []
    for offset, size in zip(reversed(box.offsets), reversed(box.sizes), strict=True):
        index, rest = divmod(index, size)
        place.append(offset + rest)
    return place[::-1]


def same_object(one: Source, other: Source, fqn: str) -> bool:
    """Equal stored bytes, or equal values (archives differ with the torch that wrote them)."""
    if one.read_object(fqn) == other.read_object(fqn):
        return True
    if not isinstance(one, DcpSource) or not isinstance(other, DcpSource):
        return False
    return _same_value(one.load_object(fqn), other.load_object(fqn))


def _same_value(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return bool(one == other)
