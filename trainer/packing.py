"""Documents as units: each alone, or packed into rows. Which tokens a unit holds is `ckptool.UnitLayout`'s to say."""

from __future__ import annotations

import numpy as np

from ckptool import UnitLayout
from trainer.corpus import Corpus
from trainer.units import Pairs, Row, bucket_length

PACKING_VERSION = UnitLayout.packing_version


class Documents:
    """Each document is a unit, a long one several."""

    kind = "document"

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises UsageError when the corpus has no document of two tokens."""
        self._pairs = Pairs(corpus)
        self._layout = UnitLayout(corpus.folder, self.kind, seq_len)
        self.seq_len = seq_len
        self.num_units = self._layout.num_units
        self.fill = self._layout.num_inputs / (self.num_units * seq_len)

    def row(self, index: int, epoch: int = 0) -> Row:
        [(start, size)] = self._layout.stretches(index)
        return self._pairs.row(start, size)

    def padded_length(self, longest: int) -> int:
        return bucket_length(max(longest, 1), self.seq_len)


class PackedRows:
    """Rows of up to `seq_len` inputs, each filled with whole documents (or stretches of long ones) of one block."""

    kind = "ffd-block"

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises UsageError when the corpus has no document of two tokens."""
        self._pairs = Pairs(corpus)
        self._layout = UnitLayout(corpus.folder, self.kind, seq_len)
        self.seq_len = seq_len
        self.num_units = self._layout.num_units
        self.fill = self._layout.num_inputs / (self.num_units * seq_len)

    def row(self, index: int, epoch: int = 0) -> Row:
        rows = [self._pairs.row(start, size) for start, size in self._layout.stretches(index)]
        return Row(
            np.concatenate([row.inputs for row in rows]),
            np.concatenate([row.labels for row in rows]),
            np.concatenate([np.arange(len(row.inputs)) for row in rows]),
        )

    def padded_length(self, longest: int) -> int:
        return self.seq_len
