"""Units: what the order of the data counts, each a row of inputs with the labels after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ckptool import MismatchError, UsageError
from trainer.corpus import Corpus
from trainer.sources.stream import TokenStream

#: Label of a position that is not trained (torch's `cross_entropy` default).
IGNORED = -100

#: Short rows are padded to a multiple of this, so that not every batch has a shape of its own.
BUCKET_TOKENS = 64


def unknown_token(token: int, vocab_size: int, where: str) -> MismatchError:
    """The data has a token for which the model has no embedding. On a GPU the kernel's own error names nothing."""
    return MismatchError(
        f"{where}: token {token}, and the model has embeddings for {vocab_size} tokens",
        hint="the tokenizer is another model's, or tokens were added and the embeddings not resized",
    )


@dataclass(frozen=True)
class Row:
    """int64 arrays of one length: `labels[i]` is the token after `inputs[i]`, or IGNORED.

    `positions` begin at 0 for each document of a packed row, and for its padding; None: a row is one sequence.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None


@dataclass(frozen=True)
class MicroBatch:
    """`units` are the numbers of the units inside; the tensors are int64 of shape (units, tokens).

    A batch without units is a dummy: one row whose labels are all IGNORED. With `position_ids`, attention must keep
    apart what begins at position 0.
    """

    units: tuple[int, ...]
    inputs: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None

    def num_trained(self) -> int:
        """How many labels are trained."""
        return int((self.labels != IGNORED).sum())


class Units(Protocol):
    """The units of a corpus, numbered from 0. `fill` is the share of a row's `seq_len` positions that holds tokens."""

    kind: str
    seq_len: int
    num_units: int
    fill: float

    def row(self, index: int, epoch: int = 0) -> Row:
        """Unit `index`, at most `seq_len` long; only a stream has other units in other epochs."""

    def padded_length(self, longest: int) -> int:
        """The length of the rows of a batch whose longest has `longest` tokens."""


class Windows:
    """A corpus cut into windows of `seq_len` inputs, documents running on in them. The tail is left out."""

    kind = "window"
    fill = 1.0

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises UsageError when the corpus is shorter than one window."""
        self._pairs = Pairs(corpus)
        self.seq_len = seq_len
        self.num_units = (corpus.num_tokens - 1) // seq_len
        if self.num_units < 1:
            raise UsageError(
                f"{corpus.name}: {corpus.num_tokens} tokens; one window needs {seq_len + 1}",
                hint="more data, or a smaller --seq-len",
            )

    def row(self, index: int, epoch: int = 0) -> Row:
        return self._pairs.row(index * self.seq_len, self.seq_len)

    def padded_length(self, longest: int) -> int:
        return self.seq_len


class Pairs:
    """Inputs and labels out of a corpus, with the labels that are not trained masked."""

    def __init__(self, corpus: Corpus) -> None:
        self._tokens: TokenStream = corpus.tokens()
        self._trained: TokenStream | None = corpus.trained()

    def row(self, start: int, length: int) -> Row:
        """`length` inputs from token `start` on."""
        tokens = self._tokens.read(start, start + length + 1)
        labels = tokens[1:].copy()
        if self._trained is not None:
            labels[self._trained.read(start + 1, start + length + 1) == 0] = IGNORED
        return Row(tokens[:-1], labels)


def check_tokens(batches: Iterable[MicroBatch], vocab_size: int) -> None:
    """Raises MismatchError when a batch has a token that is none of the model's."""
    for batch in batches:
        lowest, highest = int(batch.inputs.min()), int(torch.maximum(batch.inputs, batch.labels).max())
        if lowest < 0 or highest >= vocab_size:
            raise unknown_token(lowest if lowest < 0 else highest, vocab_size, f"units {batch.units}")


def bucket_length(longest: int, seq_len: int) -> int:
    return min(seq_len, -(-longest // BUCKET_TOKENS) * BUCKET_TOKENS)


def collate(units: Sequence[int], rows: Sequence[Row], length: int) -> MicroBatch:
    """Rows as a batch, padded at their ends to `length`; without rows a dummy."""
    inputs = np.zeros((max(len(rows), 1), length), np.int64)
    labels = np.full_like(inputs, IGNORED)
    positions = np.tile(np.arange(length), (len(inputs), 1))
    is_packed = False
    for number, row in enumerate(rows):
        size = len(row.inputs)
        inputs[number, :size], labels[number, :size] = row.inputs, row.labels
        if row.positions is not None:
            is_packed = True
            positions[number] = np.concatenate([row.positions, np.arange(length - size)])
    position_ids = torch.from_numpy(positions) if is_packed else None
    return MicroBatch(tuple(units), torch.from_numpy(inputs), torch.from_numpy(labels), position_ids)
