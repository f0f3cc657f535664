"""Packed rows and documents: every token after a document's first is one label, once, and documents stay apart."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import DamagedError, UnsupportedError, UsageError
from ckptool.formats import unit_layout
from ckptool.formats.unit_layout import first_fit_decreasing
from tests.trainer.tiny import make_tokenizer, run
from trainer.corpus import Corpus, open_corpus
from trainer.packing import Documents, PackedRows
from trainer.packing_check import check_documents_apart
from trainer.sources.spec import SourceSpec
from trainer.sources.stream import TokenPart
from trainer.units import IGNORED, Row, collate

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def corpus_of(folder, lengths):
    """A corpus whose tokens are 0, 1, 2, ... in documents of these lengths."""
    num_tokens = sum(lengths)
    np.arange(num_tokens, dtype=np.uint32).tofile(folder / "tokens")
    np.save(folder / "lengths.npy", np.array(lengths, np.int64))
    parts = (TokenPart(folder / "tokens", "uint32", 0, num_tokens),)
    return Corpus("made", folder, parts, (), num_tokens, len(lengths), {})


def pairs_of(lengths):
    """The inputs of all documents: each token but the last of its document."""
    ends = np.cumsum(lengths)
    return sorted(set(range(sum(lengths))) - {int(end) - 1 for end in ends})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 16))
@pytest.mark.parametrize("unit", [PackedRows, Documents])
def test_every_input_is_in_one_unit_with_the_token_after_it(unit, tmp_path_factory, lengths, seq_len, block):
    folder = tmp_path_factory.mktemp("corpus")
    corpus = corpus_of(folder, [*lengths, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_layout, "BLOCK_DOCUMENTS", block)
        units = unit(corpus, seq_len)
        rows = [units.row(index) for index in range(units.num_units)]
        again = unit(corpus, seq_len)
        assert [row.inputs.tolist() for row in map(again.row, range(again.num_units))] == [
            r.inputs.tolist() for r in rows
        ]
    assert all(1 <= len(row.inputs) <= seq_len for row in rows)
    inputs = np.concatenate([row.inputs for row in rows])
    assert sorted(inputs.tolist()) == pairs_of([*lengths, 2])
    assert np.array_equal(np.concatenate([row.labels for row in rows]), inputs + 1)
    assert units.fill == pytest.approx(len(inputs) / (len(rows) * seq_len))


@given(st.lists(st.integers(1, 10), max_size=80))
def test_first_fit_decreasing_puts_each_item_where_it_first_fits(sizes):
    bins = first_fit_decreasing(np.array(sizes, np.int64), 10)
    assert sorted(item for members in bins for item in members) == list(range(len(sizes)))
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((n for n, room in enumerate(free) if room >= size), None)
        if place is None:
            free.append(10 - size)
        else:
            free[place] -= size
    assert [10 - sum(sizes[item] for item in members) for members in bins] == free


def test_the_golden_rows_of_packing_version_1(tmp_path):
    """A change here changes what checkpoints were trained on: it needs a new PACKING_VERSION."""
    assert unit_layout.PACKING_VERSION == 1
    units = PackedRows(corpus_of(tmp_path, [5, 3, 9, 2, 4, 1, 20]), 8)
    rows = [units.row(index) for index in range(units.num_units)]
    assert [row.inputs.tolist() for row in rows] == [
        [8, 9, 10, 11, 12, 13, 14, 15],
        [24, 25, 26, 27, 28, 29, 30, 31],
        [32, 33, 34, 35, 36, 37, 38, 39],
        [0, 1, 2, 3, 17, 19, 20, 21],
        [5, 6, 40, 41, 42],
    ]
    assert [row.positions.tolist() for row in rows[3:]] == [[0, 1, 2, 3, 0, 0, 1, 2], [0, 1, 0, 1, 2]]


def test_no_row_holds_documents_of_two_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_layout, "BLOCK_DOCUMENTS", 2)
    units = PackedRows(corpus_of(tmp_path, [3, 3, 3, 3]), 64)
    assert [units.row(n).inputs.tolist() for n in range(units.num_units)] == [[0, 1, 3, 4], [6, 7, 9, 10]]


def test_a_document_s_logits_in_a_packed_row_are_its_logits_alone(tmp_path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TINY, intermediate_size=48, num_key_value_heads=2)
    ).eval()
    units = PackedRows(corpus_of(tmp_path, [5, 8, 12, 3, 20]), 24)
    batch = collate(range(units.num_units), [units.row(n) for n in range(units.num_units)], 24)
    packed = model(input_ids=batch.inputs, position_ids=batch.position_ids, use_cache=False).logits
    num_seen = 0
    for row in range(len(batch.inputs)):
        starts = torch.where(batch.position_ids[row] == 0)[0].tolist()
        for start, stop in zip(starts, [*starts[1:], 24], strict=True):
            alone = model(input_ids=batch.inputs[row : row + 1, start:stop], use_cache=False).logits[0]
            assert torch.allclose(packed[row, start:stop], alone, atol=1e-6)
            num_seen += 1
    assert num_seen >= 5


def test_padding_is_a_document_of_its_own_and_is_not_trained():
    row = Row(np.array([7, 8, 9]), np.array([8, 9, 10]), np.array([0, 1, 0]))
    batch = collate([4], [row], 5)
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 1]]
    assert batch.labels.tolist() == [[8, 9, 10, IGNORED, IGNORED]]
    assert batch.num_trained() == 3


@pytest.mark.parametrize(
    ("config", "is_apart"),
    [
        (transformers.LlamaConfig(**TINY, intermediate_size=48), True),
        (transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64), True),
        (transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), False),
        (transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4), False),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_models_that_can_not_keep_documents_apart_are_refused(config, is_apart):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if is_apart:
        check_documents_apart(model, torch.device("cpu"))
    else:
        with pytest.raises(UnsupportedError, match=r"see each other"):
            check_documents_apart(model, torch.device("cpu"))
    assert model.training


def test_the_check_of_a_compiled_model_compiles_nothing():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, intermediate_size=48))
    compiled = []
    for layer in model.model.layers:
        layer.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    check_documents_apart(model, torch.device("cpu"))
    assert compiled == []


def test_documents_without_a_pair_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no document of the data has two tokens"):
        PackedRows(corpus_of(tmp_path, [1, 1]), 8)


def test_counts_of_another_corpus_are_damaged(tmp_path):
    PackedRows(corpus_of(tmp_path, [3, 3]), 8)
    path = tmp_path / "packed-v1-8.npy"
    np.save(path, np.ones(7, np.int64))
    with pytest.raises(DamagedError, match="should count 1 blocks"):
        PackedRows(corpus_of(tmp_path, [3, 3]), 8)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(DamagedError, match=path.name):
        PackedRows(corpus_of(tmp_path, [3, 3]), 8)


@pytest.mark.parametrize("unit", ["pack", "document"])
def test_training_by_documents_counts_their_labels_only(root, unit):
    """30 documents of one epoch: all labels, each trained once, over steps of any fill."""
    lines = run(root, unit=unit, seq_len=128, steps=3, global_batch_size=10)
    make_tokenizer().save_pretrained(root / "hf")
    spec = SourceSpec("files", (str(root / "text"),), "files")
    corpus = open_corpus(spec, root / "hf", root, print)
    lengths = corpus.document_lengths()
    assert max(lengths) <= 129
    if unit == "document":
        assert sum(line["tokens"] for line in lines) == corpus.num_tokens - corpus.num_documents
    else:
        assert all(line["tokens"] < 10 * 128 for line in lines)
    assert all(line["loss"] > 0 for line in lines)
