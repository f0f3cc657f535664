"""Version 1 of the order, in which runs that began under it go on: a keyed permutation of `range(num_units)` an epoch.

A pure function of (seed, epoch, num_units, i). Nothing here may change: checkpoints record the version, and golden
vectors in the tests hold the values. `docs/spec/data-position.md` is the format's text.
"""

from __future__ import annotations

import functools
from array import array
from hashlib import blake2b

ORDER_VERSION = 1

#: Up to this size an epoch's permutation is sorted once and kept; above it, indices are computed one by one.
MAX_SORTED_UNITS = 65536

NUM_ROUNDS = 8
_PERSON = b"ckptool-order-1"


def unit_index(seed: int, epoch: int, num_units: int, i: int) -> int:
    """Which unit of `range(num_units)` comes at place `i` of an epoch. A bijection of `range(num_units)` in `i`.

    Raises IndexError when `i` is not in `range(num_units)`.
    """
    if not 0 <= i < num_units:
        raise IndexError(f"place {i} is outside an epoch of {num_units} units")
    if num_units <= MAX_SORTED_UNITS:
        return _sorted_permutation(seed, epoch, num_units)[i]
    return _walk(_key(seed, epoch, num_units), num_units, i)


def _key(seed: int, epoch: int, num_units: int) -> bytes:
    text = f"seed={seed} epoch={epoch} num_units={num_units}"
    return blake2b(text.encode("ascii"), digest_size=32, person=_PERSON).digest()


def _hash(key: bytes, tag: int, value: int) -> int:
    data = bytes([tag]) + value.to_bytes(8, "big")
    return int.from_bytes(blake2b(data, digest_size=8, key=key, person=_PERSON).digest(), "big")


@functools.lru_cache(maxsize=4)
def _sorted_permutation(seed: int, epoch: int, num_units: int) -> array[int]:
    """Units sorted by their keyed hash; a tie of hashes is broken by the unit itself."""
    key = _key(seed, epoch, num_units)
    return array("L", sorted(range(num_units), key=lambda unit: (_hash(key, 255, unit), unit)))


def _walk(key: bytes, num_units: int, i: int) -> int:
    """Permute the smallest even-bit domain that holds `num_units`; values outside are permuted again until inside.

    The domain is at most four times `num_units`, so that this takes four rounds of the network at worst on average.
    """
    half_bits = ((num_units - 1).bit_length() + 1) // 2
    while True:
        i = _feistel(key, half_bits, i)
        if i < num_units:
            return i


def _feistel(key: bytes, half_bits: int, value: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(NUM_ROUNDS):
        left, right = right, left ^ (_hash(key, round_number, right) & mask)
    return left << half_bits | right
