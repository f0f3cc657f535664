"""Units to batches: every rank runs equally many, and each unit is in one of them."""

import numpy as np
import pytest

from ckptool import DataPosition, DataSource, UsageError
from tests.trainer.tiny import make_tokenizer
from trainer.corpus import open_corpus
from trainer.data import micro_batches
from trainer.sources.spec import SourceSpec
from trainer.units import IGNORED, Windows


@pytest.fixture
def corpus_of(tmp_path):
    """A text as a corpus."""
    make_tokenizer().save_pretrained(tmp_path / "hf")

    def open_text(text):
        (tmp_path / "a.txt").write_text(text)
        return open_corpus(SourceSpec("files", (str(tmp_path / "a.txt"),), "files"), tmp_path / "hf", tmp_path, print)

    return open_text


def test_windows_predict_the_next_token_and_cover_the_stream(corpus_of):
    corpus = corpus_of("0123456789abcdef")
    windows = Windows(corpus, seq_len=5)
    assert windows.num_units == 3
    position = DataPosition.begin([DataSource("a", 3)], seq_len=5, seed=0, global_batch_size=3)
    [batch] = micro_batches(windows, position, rank=0, world_size=1, micro_batch_size=4)
    assert batch.units == (0, 1, 2)
    rows = {position.unit(g)[1]: row for g, row in zip(batch.units, batch.inputs.tolist(), strict=True)}
    assert rows[0] + rows[1] + rows[2] == corpus.tokens().read(0, 15).tolist()
    labels = {position.unit(g)[1]: row for g, row in zip(batch.units, batch.labels.tolist(), strict=True)}
    assert labels[0] + labels[1] + labels[2] == corpus.tokens().read(1, 16).tolist()


def test_every_rank_runs_equally_many_micro_batches(corpus_of):
    windows = Windows(corpus_of("x" * 100), seq_len=5)
    source = DataSource("a", windows.num_units)
    position = DataPosition.begin([source], seq_len=5, seed=0, global_batch_size=4).advance().with_batch_size(7)
    ranks = [list(micro_batches(windows, position, rank, 3, micro_batch_size=1)) for rank in range(3)]
    assert [[batch.units for batch in batches] for batches in ranks] == [
        [(4,), (7,), (10,)],
        [(5,), (8,), ()],
        [(6,), (9,), ()],
    ]
    dummy = ranks[1][2]
    assert dummy.inputs.shape == (1, 5)
    assert np.all(dummy.labels.numpy() == IGNORED)
    assert sum(batch.num_trained() for batches in ranks for batch in batches) == 7 * 5


def test_a_corpus_shorter_than_a_window_is_refused(corpus_of):
    with pytest.raises(UsageError, match="6 tokens; one window needs 17"):
        Windows(corpus_of("short"), seq_len=16)
