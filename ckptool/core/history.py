"""The proof of what was trained: a sum over units, which ranks add up in any order and on any world size.

Each trained unit counts BLAKE2b-128 of its number, epoch, index and source; the sum is modulo 2**128. A unit that was
trained twice, or not at all, gives another sum than the one that `data verify --replay` recomputes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from ckptool.core.segment import Unit

HISTORY_BYTES = 16

#: The digest of no units. Of units that nobody counted, as in records of version 1, the digest is UNKNOWN.
NOTHING = "0" * 2 * HISTORY_BYTES
UNKNOWN = ""

_MODULUS = 1 << 8 * HISTORY_BYTES
_PERSON = b"ckptool-units-1"


@dataclass(frozen=True)
class Fed:
    """What one rank was fed since unit `start` was the next one: how many units, and their digest."""

    start: int
    num_units: int = 0
    digest: str = NOTHING

    def plus(self, numbered_units: Iterable[tuple[int, Unit]]) -> Fed:
        """With these units too, each given with its number in the stream."""
        more = list(numbered_units)
        return Fed(self.start, self.num_units + len(more), add_histories([self.digest, history_of(more)]))


def history_of(numbered_units: Iterable[tuple[int, Unit]]) -> str:
    """The digest, in hex, of units that were trained, each given with its number in the stream."""
    total = 0
    for number, unit in numbered_units:
        text = json.dumps([number, *unit], separators=(",", ":")).encode("ascii")
        total += int.from_bytes(blake2b(text, digest_size=HISTORY_BYTES, person=_PERSON).digest(), "big")
    return _hex(total)


def add_histories(digests: Iterable[str]) -> str:
    """The digest of all that several digests cover; UNKNOWN when one of them is."""
    digests = list(digests)
    if UNKNOWN in digests:
        return UNKNOWN
    return _hex(sum(int(digest, 16) for digest in digests))


def _hex(total: int) -> str:
    return f"{total % _MODULUS:0{2 * HISTORY_BYTES}x}"
