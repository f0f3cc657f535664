"""Mixtures: how often each source comes, as whole slots in blocks of 1024, and where in a block its slots lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from itertools import islice

from ckptool.core.order import keyed_words
from ckptool.errors import UsageError

BLOCK_SLOTS = 1024


def slots_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """Whole slots of a block in proportion to the weights, 1024 in all: rounded down, then the largest remainders up.

    Raises UsageError when a weight is no positive number, or is too small for a slot.
    """
    wrong = [name for name, weight in weights.items() if not (math.isfinite(weight) and weight > 0)]
    if wrong or not weights:
        raise UsageError(f"the weight of {wrong[0]} is not a positive number" if wrong else "no sources, so no weights")
    total = math.fsum(weights.values())
    exact = [weight / total * BLOCK_SLOTS for weight in weights.values()]
    slots = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(slots)), key=lambda i: (slots[i] - exact[i], i))
    for i in by_remainder[: BLOCK_SLOTS - sum(slots)]:
        slots[i] += 1
    for name, count in zip(weights, slots, strict=True):
        if count == 0:
            raise UsageError(
                f"the weight of {name} is {weights[name] / total:.2g} of all: less than one unit in {BLOCK_SLOTS}",
                hint="raise it, or leave the source out",
            )
    return tuple(slots)


@functools.lru_cache(maxsize=64)
def block_layout(seed: int, done: int, block: int, slots: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """For each slot of a block, whose it is and how many of that source came before it in the block.

    `done` (units before the mixture's first block) and `block` key the shuffle; `slots` are the counts per source,
    BLOCK_SLOTS together.
    """
    counts = " ".join(map(str, slots))
    words = keyed_words(f"ckptool-order-2 seed={seed} done={done} block={block} slots={counts}", BLOCK_SLOTS)
    owners = [0] * BLOCK_SLOTS
    sorted_slots = iter(sorted(range(BLOCK_SLOTS), key=words.__getitem__))
    for source, count in enumerate(slots):
        for slot in islice(sorted_slots, count):
            owners[slot] = source
    seen = [0] * len(slots)
    before = []
    for source in owners:
        before.append(seen[source])
        seen[source] += 1
    return owners, before
