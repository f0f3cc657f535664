"""The order in which a source's units are trained: for each epoch a keyed permutation of `range(num_units)`.

A pure function that needs no memory beyond one epoch of a small source. Nothing here may change without a new
ORDER_VERSION: checkpoints record the version, and golden vectors in the tests hold the values.
`docs/spec/data-position.md` is the format's text.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from hashlib import shake_256

ORDER_VERSION = 2

#: Up to this size an epoch's permutation is sorted once and kept; above it, indices are computed one by one.
MAX_SORTED_UNITS = 65536

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1


def unit_indices(seed: int, source: str, epoch: int, num_units: int, places: Iterable[int]) -> list[int]:
    """Which units of `range(num_units)` come at these places of an epoch of `source`: a bijection, place by place.

    Raises IndexError when a place is not in `range(num_units)`.
    """
    places = list(places)
    if places and not 0 <= min(places) <= max(places) < num_units:
        raise IndexError(f"a place is outside an epoch of {num_units} units")
    if num_units <= MAX_SORTED_UNITS:
        permutation = _sorted_permutation(seed, source, epoch, num_units)
        return [permutation[place] for place in places]
    return _walk(_round_keys(seed, source, epoch, num_units), num_units, places)


def keyed_words(text: str, num_words: int) -> tuple[int, ...]:
    """SHAKE-256 of an ASCII text, as big-endian unsigned words of 8 bytes."""
    return struct.unpack(f">{num_words}Q", shake_256(text.encode("ascii")).digest(num_words * 8))


def _key(seed: int, source: str, epoch: int, num_units: int) -> str:
    # As JSON the name is ASCII and ends where it ends, whatever is in it.
    return f"ckptool-order-2 seed={seed} source={json.dumps(source)} epoch={epoch} num_units={num_units}"


@functools.lru_cache(maxsize=64)
def _sorted_permutation(seed: int, source: str, epoch: int, num_units: int) -> array[int]:
    """Units sorted by a keyed random word each; a tie is broken by the unit itself."""
    words = keyed_words(_key(seed, source, epoch, num_units), num_units)
    return array("I", sorted(range(num_units), key=words.__getitem__))


@functools.lru_cache(maxsize=1024)
def _round_keys(seed: int, source: str, epoch: int, num_units: int) -> tuple[tuple[int, int], ...]:
    """For each round an odd multiplier and an addend: `(x + k) * factor` is `x * factor + addend`, with k a word."""
    words = keyed_words(_key(seed, source, epoch, num_units), 2 * NUM_ROUNDS)
    factors = [word | 1 for word in words[1::2]]
    return tuple((factor, word * factor & _MASK) for word, factor in zip(words[::2], factors, strict=True))


def _walk(keys: tuple[tuple[int, int], ...], num_units: int, places: Sequence[int]) -> list[int]:
    """A Feistel network over pairs (left, right) of `range(height) x range(width)`, the tightest near-square that holds
    `num_units`; the few values outside are permuted again until they are inside.

    Halves that are added modulo height and width, instead of combined bit by bit, are Black and Rogaway's, "Ciphers
    with Arbitrary Finite Domains" (CT-RSA 2002), section 5.
    """
    height = math.isqrt(num_units - 1) + 1
    width = -(-num_units // height)
    # Written out round by round: as a loop over the keys it takes a fifth longer.
    (f0, a0), (f1, a1), (f2, a2), (f3, a3), (f4, a4), (f5, a5), (f6, a6), (f7, a7) = keys
    indices = []
    for value in places:
        while True:
            left, right = divmod(value, width)
            mixed = right * f0 + a0 & _MASK
            left = (left + (mixed ^ mixed >> 32)) % height
            mixed = left * f1 + a1 & _MASK
            right = (right + (mixed ^ mixed >> 32)) % width
            mixed = right * f2 + a2 & _MASK
            left = (left + (mixed ^ mixed >> 32)) % height
            mixed = left * f3 + a3 & _MASK
            right = (right + (mixed ^ mixed >> 32)) % width
            mixed = right * f4 + a4 & _MASK
            left = (left + (mixed ^ mixed >> 32)) % height
            mixed = left * f5 + a5 & _MASK
            right = (right + (mixed ^ mixed >> 32)) % width
            mixed = right * f6 + a6 & _MASK
            left = (left + (mixed ^ mixed >> 32)) % height
            mixed = left * f7 + a7 & _MASK
            right = (right + (mixed ^ mixed >> 32)) % width
            value = left * width + right
            if value < num_units:
                break
        indices.append(value)
    return indices
