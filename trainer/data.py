"""Which units a rank trains in a step, and the rows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ckptool import DataPosition, UsageError, rank_units
from trainer.corpus import Corpus, open_corpus
from trainer.packing import Documents, PackedRows
from trainer.sources.spec import parse_sources
from trainer.units import MicroBatch, Units, Windows, collate

#: What `--unit` may be.
UNITS: dict[str, type[Windows] | type[PackedRows] | type[Documents]] = {
    "window": Windows,
    "pack": PackedRows,
    "document": Documents,
}


def prepare(
    data: tuple[str, ...], unit: str, seq_len: int, hf_folder: Path, root: Path, say: Callable[[str], None]
) -> Corpus:
    """Everything about the data that is made once, for rank 0; `open_units` is quick after it.

    Raises the errors of `parse_sources`, `open_corpus` and of the unit.
    """
    specs = parse_sources(data)
    if len(specs) != 1:
        raise UsageError(f"{len(specs)} sources, but a run has one", hint="--data PATH... of one kind")
    corpus = open_corpus(specs[0], hf_folder, root, say)
    units = open_units(corpus, unit, seq_len)
    say(
        f"{corpus.name}: {corpus.num_tokens:,} tokens in {corpus.num_documents:,} documents, "
        f"{units.num_units:,} units of kind {units.kind}, {units.fill:.1%} full"
    )
    return corpus


def open_units(corpus: Corpus, unit: str, seq_len: int) -> Units:
    """The units of a corpus. Raises UsageError when it is too small for one."""
    return UNITS[unit](corpus, seq_len)


def micro_batches(
    units: Units, position: DataPosition, rank: int, world_size: int, micro_batch_size: int
) -> Iterator[MicroBatch]:
    """A rank's part of the next step, rows of like length together. Every rank gets equally many batches, the last
    ones dummies where needed."""
    step = position.next_units()
    mine = [(g, units.row(position.unit(g)[1])) for g in rank_units(step, rank, world_size)]
    mine.sort(key=lambda unit: len(unit[1].inputs), reverse=True)
    for start in range(0, len(rank_units(step, 0, world_size)), micro_batch_size):
        part = mine[start : start + micro_batch_size]
        rows = [row for _, row in part]
        length = units.padded_length(max((len(row.inputs) for row in rows), default=0))
        yield collate([g for g, _ in part], rows, length)
