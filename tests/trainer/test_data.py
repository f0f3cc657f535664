"""Units to batches: every rank runs equally many, each unit is in one of them, and mixtures keep their shares."""

import collections

import datasets
import numpy as np
import pytest

from ckptool import UsageError
from tests.trainer.tiny import make_tokenizer
from trainer.data import TrainingData, prepare
from trainer.units import IGNORED


@pytest.fixture
def data_of(tmp_path):
    """The data of `--data` options, with windows of 5 tokens."""
    make_tokenizer().save_pretrained(tmp_path / "hf")

    def opened(*options, unit="window", seq_len=5):
        prepared = prepare(tuple(map(str, options)), unit, seq_len, tmp_path / "hf", tmp_path, print)
        return TrainingData(prepared, unit, seq_len, tmp_path / "hf")

    return opened


@pytest.fixture
def text_of(tmp_path):
    def written(text, name="a.txt"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return written


def test_windows_predict_the_next_token_and_cover_the_stream(data_of, text_of):
    data = data_of(text_of("0123456789abcdef"))
    position = data.start(seed=0, global_batch_size=3)
    [batch] = data.micro_batches(position, rank=0, world_size=1, micro_batch_size=4)
    assert batch.units == (0, 1, 2)
    indices = [unit.index for unit in position.units(range(3))]
    rows = dict(zip(indices, batch.inputs.tolist(), strict=True))
    labels = dict(zip(indices, batch.labels.tolist(), strict=True))
    decode = make_tokenizer().decode
    assert decode(rows[0] + rows[1] + rows[2]) == "0123456789abcde"
    assert decode(labels[0] + labels[1] + labels[2]) == "123456789abcdef"


def test_every_rank_runs_equally_many_micro_batches(data_of, text_of):
    data = data_of(text_of("x" * 100))
    position = data.start(seed=0, global_batch_size=4).advance().with_batch_size(7)
    ranks = [list(data.micro_batches(position, rank, 3, micro_batch_size=1)) for rank in range(3)]
    assert [[batch.units for batch in batches] for batches in ranks] == [
        [(4,), (7,), (10,)],
        [(5,), (8,), ()],
        [(6,), (9,), ()],
    ]
    dummy = ranks[1][2]
    assert dummy.inputs.shape == (1, 5)
    assert np.all(dummy.labels.numpy() == IGNORED)
    assert sum(batch.num_trained() for batches in ranks for batch in batches) == 7 * 5


def test_a_corpus_shorter_than_a_window_is_refused(data_of, text_of):
    with pytest.raises(UsageError, match="6 tokens; one window needs 17"):
        data_of(text_of("short"), seq_len=16)


def mixture(tmp_path, *weights):
    tables = [
        f'[[source]]\npath = "{name}.txt"\n' + (f"weight = {weight}\n" if weight else "")
        for name, weight in zip("abc", weights, strict=False)
    ]
    (tmp_path / "mix.toml").write_text("".join(tables))
    return tmp_path / "mix.toml"


def test_a_mixture_draws_from_each_source_by_its_weight(tmp_path, data_of, text_of):
    text_of("a" * 200, "a.txt")
    text_of("b" * 50, "b.txt")
    counts = {}
    for weights in ((3, 1), (None, None)):
        data = data_of(mixture(tmp_path, *weights))
        position = data.start(seed=0, global_batch_size=1024)
        batches = [*data.micro_batches(position, 0, 1, micro_batch_size=1024)]
        letters = make_tokenizer().decode(batches[0].inputs[:, 0].tolist()).replace("<eos>", "")
        counts[weights] = collections.Counter(letters)
    assert counts[3, 1]["a"] == pytest.approx(768, abs=12)
    assert counts[None, None]["a"] == pytest.approx(819, abs=12)
    assert counts[None, None]["b"] == pytest.approx(205, abs=12)


def test_weights_are_for_all_sources_or_none(tmp_path, data_of, text_of):
    text_of("a" * 200, "a.txt")
    text_of("b" * 50, "b.txt")
    with pytest.raises(UsageError, match=r"b\.txt has no weight"):
        data_of(mixture(tmp_path, 3, None))


@pytest.fixture
def stream(tmp_path):
    """A streamed source of 4 lanes beside a text, 1 unit of it for 1 of the text."""
    datasets.Dataset.from_dict({"text": [f"row {n} " * 3 for n in range(80)]}).save_to_disk(tmp_path / "rows")
    (tmp_path / "a.txt").write_text("a" * 200)
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "a.txt"\nweight = 1\n[[source]]\nkind = "stream"\npath = "rows"\nweight = 1\nlanes = 4\n'
    )
    return tmp_path / "mix.toml"


class AllRanks:
    """What `Ranks.gather` does, for data of several ranks in this process."""

    def __init__(self, parts):
        self._parts = parts

    def gather(self, _):
        return self._parts


def steps_on(data_of, source, plan):
    """The rows of each step, sorted, over stretches of (steps, world size), with a save and a resume between them."""
    position, states, rows = None, None, []
    for num_steps, world_size in plan:
        ranks = [data_of(source) for _ in range(world_size)]
        position = position or ranks[0].start(seed=0, global_batch_size=7)
        for rank in ranks:
            if states is not None:
                rank.restore_lanes(states)
        for _ in range(num_steps):
            batches = [list(data.micro_batches(position, r, world_size, 2)) for r, data in enumerate(ranks)]
            assert len({len(of_rank) for of_rank in batches}) == 1
            filled = [batch for of_rank in batches for batch in of_rank if batch.units]
            fed = [pair for batch in filled for pair in zip(batch.units, batch.inputs.tolist(), strict=True)]
            assert sorted(g for g, _ in fed) == list(position.next_units())
            rows += [row for _, row in sorted(fed)]
            position = position.advance()
        parts = [{lane: s for lanes in data.lanes.values() for lane, s in lanes.states().items()} for data in ranks]
        states = ranks[0].lane_states(AllRanks(parts))
    return rows


def test_streams_and_texts_go_on_over_world_sizes_as_if_nothing_happened(data_of, stream):
    smooth = steps_on(data_of, stream, [(12, 1)])
    assert steps_on(data_of, stream, [(3, 2), (1, 5), (4, 3), (4, 1)]) == smooth


def test_a_stream_needs_windows_and_in_a_mixture_weights(tmp_path, data_of, stream):
    with pytest.raises(UsageError, match="streams are cut into windows"):
        data_of(stream, unit="pack")
    with pytest.raises(UsageError, match="a mixture with it needs weights"):
        data_of(tmp_path / "a.txt", f"stream:{tmp_path / 'rows'}")
