"""Which tokens of a corpus its units of kind `document` and `ffd-block` hold: docs/spec/data-units.md.

Packing looks at one block of BLOCK_DOCUMENTS documents at a time, so that a row is a function of its number: no buffer
has to be in a checkpoint. Documents longer than `seq_len` are cut. Any change to what a unit holds is a new
PACKING_VERSION, which is part of the fingerprint.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np

from ckptool.errors import DamagedError, UsageError

LENGTHS_FILE = "lengths.npy"
BLOCK_DOCUMENTS = 1024
PACKING_VERSION = 1
_CACHED_BLOCKS = 64

#: Stretches of documents: rows of (first token in the corpus, number of inputs), int64.
Stretches = np.ndarray


class UnitLayout:
    """The units of one kind and length over the corpus in a cache folder; its `lengths.npy` has all documents' tokens.

    `num_inputs` are the tokens of all units together. How many units each block has is kept in the folder.
    """

    packing_version = PACKING_VERSION

    def __init__(self, folder: Path, kind: str, seq_len: int) -> None:
        """Raises UsageError when the corpus has no document of two tokens, DamagedError for files that don't fit."""
        self._lengths = _load(folder / LENGTHS_FILE)
        self._kind, self._seq_len = kind, seq_len
        firsts = np.arange(0, len(self._lengths), BLOCK_DOCUMENTS)
        sums = np.add.reduceat(self._lengths, firsts) if len(firsts) else np.empty(0, np.int64)
        self._first_token = np.cumsum(sums) - sums
        self._units = functools.lru_cache(_CACHED_BLOCKS)(self._units_of)
        counts = self._counts(folder / _counts_file(kind, seq_len))
        self._first_unit = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.num_units = int(self._first_unit[-1])
        self.num_inputs = int(np.maximum(self._lengths - 1, 0).sum())
        if not self.num_units:
            raise UsageError("no document of the data has two tokens", hint="--unit window joins documents")

    def stretches(self, index: int) -> list[tuple[int, int]]:
        """The (first token, number of inputs) of each stretch in unit `index`. Raises IndexError."""
        if not 0 <= index < self.num_units:
            raise IndexError(f"unit {index} of {self.num_units}")
        block = int(np.searchsorted(self._first_unit, index, side="right")) - 1
        found = self._units(block)[index - int(self._first_unit[block])]
        return [(start, size) for start, size in found.tolist()]

    def _units_of(self, block: int) -> list[Stretches]:
        stretches = self._cut(block)
        if self._kind == "document":
            return np.split(stretches, range(1, len(stretches))) if len(stretches) else []
        return [stretches[members] for members in first_fit_decreasing(stretches[:, 1], self._seq_len)]

    def _cut(self, block: int) -> Stretches:
        """The documents of a block, in order; one of n tokens has n - 1 inputs, cut into stretches of `seq_len`."""
        lengths = np.asarray(self._lengths[block * BLOCK_DOCUMENTS : (block + 1) * BLOCK_DOCUMENTS])
        starts = int(self._first_token[block]) + np.cumsum(lengths) - lengths
        num_inputs = np.maximum(lengths - 1, 0)
        num_stretches = -(-num_inputs // self._seq_len)
        document = np.repeat(np.arange(len(lengths)), num_stretches)
        number = np.arange(len(document)) - np.repeat(np.cumsum(num_stretches) - num_stretches, num_stretches)
        offset = number * self._seq_len
        sizes = np.minimum(num_inputs[document] - offset, self._seq_len)
        return np.stack([starts[document] + offset, sizes], axis=1)

    def _counts(self, path: Path) -> np.ndarray:
        num_blocks = len(self._first_token)
        if not path.is_file():
            count = self._cut if self._kind == "document" else self._units_of
            counts = [len(count(block)) for block in range(num_blocks)]
            temporary = path.with_name(f".{path.name}-{os.getpid()}")
            with temporary.open("wb") as file:
                np.save(file, np.array(counts, np.int64))
            temporary.rename(path)
        stored = _load(path)
        if stored.shape != (num_blocks,):
            raise DamagedError(f"{path} should count {num_blocks} blocks", hint=f"rm {path}")
        return stored


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Which items share a bin: the largest first (of equals the earliest), each into the first bin that has room.

    Returns the members of each bin in item order, bins in the order in which they were opened.
    """
    num_leaves = 1 << max(0, len(sizes) - 1).bit_length()
    # A tree of the room that is left: node 1 is its root, n has the children 2n and 2n + 1, the leaves are the bins.
    room = [capacity] * (2 * num_leaves)
    size_of = sizes.tolist()
    bins: list[list[int]] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= size_of[item] else 2 * node + 1
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(item)
        room[node] -= size_of[item]
        while (node := node // 2) and room[node] != (most := max(room[2 * node], room[2 * node + 1])):
            room[node] = most
    return [sorted(members) for members in bins]


def _counts_file(kind: str, seq_len: int) -> str:
    return f"documents-{seq_len}.npy" if kind == "document" else f"packed-v{PACKING_VERSION}-{seq_len}.npy"


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DamagedError(f"{path}: {error}", hint=f"rm -r {path.parent}") from error
