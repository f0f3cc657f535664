"""Windows of tokens, and which of them a rank trains in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ckptool import DataPosition, UsageError, rank_units
from trainer.corpus import Corpus

#: Label of a position that is not trained (torch's `cross_entropy` default).
IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """`units` are the numbers of the windows inside; `inputs` and `labels` are int64 of shape (windows, seq_len).

    A batch without units is a dummy: one window whose labels are all IGNORED.
    """

    units: tuple[int, ...]
    inputs: torch.Tensor
    labels: torch.Tensor


class Windows:
    """A corpus cut into windows of `seq_len` inputs, each with the token after it as label. The tail is left out."""

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises UsageError when the corpus is shorter than one window."""
        self._tokens = corpus.tokens()
        self._seq_len = seq_len
        self.num_units = (corpus.num_tokens - 1) // seq_len
        if self.num_units < 1:
            raise UsageError(
                f"the data has {corpus.num_tokens} tokens; one window needs {seq_len + 1}",
                hint="give more --data, or a smaller --seq-len",
            )

    def micro_batches(
        self, position: DataPosition, rank: int, world_size: int, micro_batch_size: int
    ) -> Iterator[MicroBatch]:
        """A rank's part of the next step. Every rank gets equally many batches, the last ones dummies where needed."""
        units = position.next_units()
        mine = rank_units(units, rank, world_size)
        longest = len(rank_units(units, 0, world_size))
        for start in range(0, longest, micro_batch_size):
            yield self._batch(position, mine[start : start + micro_batch_size])

    def _batch(self, position: DataPosition, units: range) -> MicroBatch:
        if not units:
            nothing = torch.zeros((1, self._seq_len), dtype=torch.int64)
            return MicroBatch((), nothing, torch.full_like(nothing, IGNORED))
        rows = torch.from_numpy(np.stack([self._window(position.unit(g)[1]) for g in units]).astype(np.int64))
        return MicroBatch(tuple(units), rows[:, :-1], rows[:, 1:])

    def _window(self, index: int) -> np.ndarray:
        start = index * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]
