"""Documents as units: each alone, or packed into rows within fixed blocks of documents.

Packing looks at one block of BLOCK_DOCUMENTS documents at a time, so that a row is a function of its number: no buffer
has to be in a checkpoint. Documents longer than `seq_len` are cut. Any change to what a row holds is a new
PACKING_VERSION, which is part of the fingerprint.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckptool import DamagedError, UsageError
from trainer.corpus import Corpus
from trainer.units import Pairs, Row, bucket_length

BLOCK_DOCUMENTS = 1024
PACKING_VERSION = 1
_CACHED_BLOCKS = 64

#: Stretches of a document: rows of (first token in the corpus, number of inputs), int64.
Stretches = np.ndarray


class Blocks:
    """The documents of a corpus in blocks: which tokens a block holds, and how many units are made of it.

    `num_units_of(stretches)` says how many units a block's stretches make; the counts are kept beside the corpus
    under `file_name`.
    """

    def __init__(self, corpus: Corpus, seq_len: int, num_units_of: Callable[[Stretches], int], file_name: str) -> None:
        """Raises UsageError when the corpus has no document of two tokens."""
        self._lengths = corpus.document_lengths()
        self._seq_len = seq_len
        firsts = np.arange(0, len(self._lengths), BLOCK_DOCUMENTS)
        sums = np.add.reduceat(self._lengths, firsts) if len(firsts) else np.empty(0, np.int64)
        self._first_token = np.cumsum(sums) - sums
        counts = self._counts(corpus.folder / file_name, num_units_of)
        self._first_unit = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.num_units = int(self._first_unit[-1])
        self.num_inputs = int(np.maximum(self._lengths - 1, 0).sum())
        if not self.num_units:
            raise UsageError("no document of the data has two tokens", hint="--unit window joins documents")

    def locate(self, index: int) -> tuple[int, int]:
        """The block of unit `index`, and its place in it. Raises IndexError."""
        if not 0 <= index < self.num_units:
            raise IndexError(f"unit {index} of {self.num_units}")
        block = int(np.searchsorted(self._first_unit, index, side="right")) - 1
        return block, index - int(self._first_unit[block])

    def stretches(self, block: int) -> Stretches:
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

    def _counts(self, path: Path, num_units_of: Callable[[Stretches], int]) -> np.ndarray:
        num_blocks = len(self._first_token)
        if not path.is_file():
            counts = [num_units_of(self.stretches(block)) for block in range(num_blocks)]
            temporary = path.with_name(f".{path.name}-{os.getpid()}")
            with temporary.open("wb") as file:
                np.save(file, np.array(counts, np.int64))
            temporary.rename(path)
        try:
            counts = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedError(f"{path}: {error}", hint=f"rm {path}") from error
        if counts.shape != (num_blocks,):
            raise DamagedError(f"{path} should count {num_blocks} blocks", hint=f"rm {path}")
        return counts


class Documents:
    """Each document is a unit, a long one several."""

    kind = "document"

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self._pairs = Pairs(corpus)
        self._blocks = Blocks(corpus, seq_len, len, f"documents-{seq_len}.npy")
        self._stretches = functools.lru_cache(_CACHED_BLOCKS)(self._blocks.stretches)
        self.seq_len = seq_len
        self.num_units = self._blocks.num_units
        self.fill = self._blocks.num_inputs / (self.num_units * seq_len)

    def row(self, index: int, epoch: int = 0) -> Row:
        block, place = self._blocks.locate(index)
        start, size = self._stretches(block)[place].tolist()
        return self._pairs.row(start, size)

    def padded_length(self, longest: int) -> int:
        return bucket_length(max(longest, 1), self.seq_len)


class PackedRows:
    """Rows of up to `seq_len` inputs, each filled with whole documents (or stretches of long ones) of one block."""

    kind = "ffd-block"

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        self._pairs = Pairs(corpus)
        name = f"packed-v{PACKING_VERSION}-{seq_len}.npy"
        self._blocks = Blocks(corpus, seq_len, lambda found: len(first_fit_decreasing(found[:, 1], seq_len)), name)
        self._packed = functools.lru_cache(_CACHED_BLOCKS)(self._pack)
        self.seq_len = seq_len
        self.num_units = self._blocks.num_units
        self.fill = self._blocks.num_inputs / (self.num_units * seq_len)

    def row(self, index: int, epoch: int = 0) -> Row:
        block, place = self._blocks.locate(index)
        rows = [self._pairs.row(start, size) for start, size in self._packed(block)[place]]
        return Row(
            np.concatenate([row.inputs for row in rows]),
            np.concatenate([row.labels for row in rows]),
            np.concatenate([np.arange(len(row.inputs)) for row in rows]),
        )

    def padded_length(self, longest: int) -> int:
        return self.seq_len

    def _pack(self, block: int) -> list[list[list[int]]]:
        stretches = self._blocks.stretches(block)
        return [stretches[members].tolist() for members in first_fit_decreasing(stretches[:, 1], self.seq_len)]


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
