"""The data of a run: its sources, which units a rank trains in a step, and the rows of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptool import DataPosition, DataSource, UsageError
from trainer.corpus import Corpus, open_corpus
from trainer.loader import LoaderData
from trainer.model import stated_vocab_size
from trainer.packing import PACKING_VERSION, Documents, PackedRows
from trainer.parallel import Ranks
from trainer.sources.lanes import Lanes, open_lanes, stream_fingerprint
from trainer.sources.spec import SourceSpec, parse_sources
from trainer.units import MicroBatch, Units, Windows, collate, unknown_token

#: What `--unit` may be.
UNITS: dict[str, type[Windows] | type[PackedRows] | type[Documents]] = {
    "window": Windows,
    "pack": PackedRows,
    "document": Documents,
}


@dataclass(frozen=True)
class Prepared:
    """A source once rank 0 has looked at it. `corpus` is None for what each rank opens for itself."""

    spec: SourceSpec
    fingerprint: dict[str, str | int]
    corpus: Corpus | None


def prepare(
    data: tuple[str, ...], unit: str, seq_len: int, hf_folder: Path, root: Path, say: Callable[[str], None]
) -> list[Prepared]:
    """Everything about the data that is made once, for rank 0; `TrainingData` is quick after it.

    Raises the errors of `parse_sources`, `open_corpus`, `stream_fingerprint` and of the unit.
    """
    return [_prepare(spec, unit, seq_len, hf_folder, root, say) for spec in parse_sources(data)]


def _prepare(
    spec: SourceSpec, unit: str, seq_len: int, hf_folder: Path, root: Path, say: Callable[[str], None]
) -> Prepared:
    if spec.kind == "loader":
        return Prepared(spec, {}, None)
    if spec.kind == "stream":
        if unit != "window":
            raise UsageError(f"{spec.name} is a stream, and streams are cut into windows", hint="--unit window")
        say(f"{spec.name}: a stream of {spec.lanes} lanes")
        return Prepared(spec, stream_fingerprint(spec, hf_folder), None)
    corpus = open_corpus(spec, hf_folder, root, say)
    vocab_size = stated_vocab_size(hf_folder)
    if vocab_size is not None and corpus.max_token is not None and corpus.max_token >= vocab_size:
        raise unknown_token(corpus.max_token, vocab_size, corpus.name)
    units = UNITS[unit](corpus, seq_len)
    say(
        f"{corpus.name}: {corpus.num_tokens:,} tokens in {corpus.num_documents:,} documents, "
        f"{units.num_units:,} units of kind {units.kind}, {units.fill:.1%} full"
    )
    packing = {"packing_version": PACKING_VERSION} if units.kind != "window" else {}
    return Prepared(spec, {**corpus.fingerprint, **packing}, corpus)


def open_data(
    prepared: list[Prepared], unit: str, seq_len: int, hf_folder: Path, rank: int, world_size: int
) -> TrainingData | LoaderData:
    """The data of this rank. Raises UsageError for sources that can't go together."""
    loader = next((source.spec for source in prepared if source.spec.kind == "loader"), None)
    if loader is None:
        return TrainingData(prepared, unit, seq_len, hf_folder)
    if len(prepared) > 1:
        raise UsageError(f"{loader.name} is a loader, which can't be mixed with other sources")
    return LoaderData(loader, rank, world_size, seq_len)


class TrainingData:
    """The sources of a run by name, and their `weights` in the mixture; None mixes by their number of units."""

    def __init__(self, prepared: list[Prepared], unit: str, seq_len: int, hf_folder: Path) -> None:
        """Raises UsageError when only some sources have a weight, and for mixtures of a stream without weights."""
        self._units: dict[str, Units] = {}
        self.lanes: dict[str, Lanes] = {}
        for source in prepared:
            name = source.spec.name
            if source.corpus is None:
                self._units[name] = self.lanes[name] = open_lanes(source.spec, hf_folder, seq_len)
            else:
                self._units[name] = UNITS[unit](source.corpus, seq_len)
        self._seq_len = seq_len
        self._length_of = next(iter(self._units.values())).padded_length
        self.sources = [
            DataSource(name, units.num_units, source.fingerprint, units.kind)
            for source, (name, units) in zip(prepared, self._units.items(), strict=True)
        ]
        self.weights = _weights([source.spec for source in prepared])
        if self.lanes and len(prepared) > 1 and self.weights is None:
            raise UsageError(f"{next(iter(self.lanes))} is a stream: a mixture with it needs weights")

    def start(self, seed: int, global_batch_size: int) -> DataPosition:
        """The beginning of the stream of units. Raises UsageError for weights that can't be."""
        return DataPosition.begin(
            self.sources,
            seq_len=self._seq_len,
            seed=seed,
            global_batch_size=global_batch_size,
            weights=self.weights,
        )

    def micro_batches(
        self, position: DataPosition, rank: int, world_size: int, micro_batch_size: int
    ) -> Iterator[MicroBatch]:
        """A rank's part of the next step, rows of like length together. Every rank gets equally many batches, the
        last ones dummies where needed.

        Unit i of a step goes to rank i % world_size; that of a stream to the rank that has its lane.
        """
        step = position.next_units()
        shares: list[list] = [[] for _ in range(world_size)]
        for number, unit in zip(step, position.units(step), strict=True):
            owner = unit.index if unit.source in self.lanes else number - step.start
            shares[owner % world_size].append((number, unit))
        mine = [(number, self._units[unit.source].row(unit.index, unit.epoch)) for number, unit in shares[rank]]
        mine.sort(key=lambda numbered: len(numbered[1].inputs), reverse=True)
        for start in range(0, max(map(len, shares)), micro_batch_size):
            part = mine[start : start + micro_batch_size]
            rows = [row for _, row in part]
            length = self._length_of(max((len(row.inputs) for row in rows), default=0))
            yield collate([number for number, _ in part], rows, length)

    def lane_states(self, ranks: Ranks) -> dict[str, dict[str, str]]:
        """Where each lane of each stream stands, from the ranks that have it; "" is a lane's beginning."""
        states: dict[str, dict[str, str]] = {}
        for name, lanes in self.lanes.items():
            found = dict(enumerate(lanes.restored))
            for part in ranks.gather(lanes.states()):
                found |= part
            states[name] = {f"{lane:05}": state for lane, state in found.items()}
        return states

    def restore_lanes(self, states: dict[str, dict[str, str]]) -> None:
        """Go on where the lanes stood; a stream without states is new. Raises MismatchError for another number."""
        for name, lanes in self.lanes.items():
            if name in states:
                lanes.restore([states[name][key] for key in sorted(states[name])])


def _weights(specs: list[SourceSpec]) -> dict[str, float] | None:
    weights = {spec.name: spec.weight for spec in specs if spec.weight is not None}
    if weights and len(weights) < len(specs):
        missing = next(spec.name for spec in specs if spec.weight is None)
        raise UsageError(f"{missing} has no weight, other sources have", hint="weight = ... for all of them, or none")
    return weights or None
