"""Units over world sizes, resumes and epochs: trained once each, to the same loss. Field reports 8, 17, 28."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers

from ckptool import DataPosition
from tests.spawn import run_ranks
from tests.trainer.tiny import at_most, make_tokenizer, read_lines, surviving_samples, tiny_config
from trainer.data import TrainingData, prepare
from trainer.train import train
from trainer.units import IGNORED

NUM_DOCUMENTS = 100
#: Each document has 9 tokens with its end, so 8 inputs: a row of 24 holds three.
SEQ_LEN = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tokenizer.save_pretrained(folder / "hf")
    rows = [json.dumps({"text": f"{n:08}"}) + "\n" for n in range(NUM_DOCUMENTS)]
    (folder / "documents.jsonl").write_text("".join(rows))
    turns = [
        [{"role": "user", "content": "x" * (n % 5)}, {"role": "assistant", "content": "y" * (n % 7)}] for n in range(90)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return folder


def open_data(folder, unit, source):
    prepared = prepare((source,), unit, SEQ_LEN, folder / "hf", folder, print)
    return TrainingData(prepared, unit, SEQ_LEN, folder / "hf")


def fed_over(data, plan, global_batch_size, micro_batch_size=2):
    """The documents' first tokens in the order of training, over stretches of (steps, world size) with resumes between.

    Every step checks that the ranks together were fed its units, once each.
    """
    position, documents = data.start(seed=3, global_batch_size=global_batch_size), []
    for num_steps, world_size in plan:
        position = DataPosition.from_json(position.to_json(), "a checkpoint")
        for _ in range(num_steps):
            fed = {}
            for rank in range(world_size):
                for batch in data.micro_batches(position, rank, world_size, micro_batch_size):
                    for unit, inputs, labels in zip(batch.units, batch.inputs, batch.labels, strict=False):
                        assert unit not in fed
                        fed[unit] = make_tokenizer().decode(inputs[labels != IGNORED].tolist())
            assert sorted(fed) == list(position.next_units())
            documents += [
                text[start : start + 8] for _, text in sorted(fed.items()) for start in range(0, len(text), 8)
            ]
            position = position.advance()
    return documents, position


ALL = [f"{n:08}" for n in range(NUM_DOCUMENTS)]


def test_report_8_a_position_moves_from_4_ranks_to_2_and_back(folder):
    """torchtitan#816: 4 -> 2 ranks lost two cursors, 2 -> 4 failed."""
    data = open_data(folder, "document", str(folder / "documents.jsonl"))
    moved, position = fed_over(data, [(2, 4), (2, 2), (2, 4)], global_batch_size=8)
    assert moved == fed_over(data, [(6, 1)], global_batch_size=8)[0]
    assert (position.consumed, len(set(moved))) == (48, 48)


def test_report_17_a_resume_at_30_at_40_and_at_the_end_of_the_epoch(folder):
    """meta-pytorch/data#1437, KempnerForge#57, streaming#700: the epoch's end replayed or dropped, the second resume
    skipped the wrong number."""
    data = open_data(folder, "document", str(folder / "documents.jsonl"))
    whole, _ = fed_over(data, [(25, 1)], global_batch_size=10)
    resumed, position = fed_over(data, [(3, 1), (1, 1), (6, 1), (15, 1)], global_batch_size=10)
    assert resumed == whole
    assert sorted(whole[:100]) == sorted(whole[100:200]) == ALL
    assert whole[:100] != whole[100:200]
    assert position.consumed == 250


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_report_28_packed_rows_are_counted_once(folder, world_size):
    """llm-foundry#1277, streaming#619: with three documents in a row, the position ran three times too fast."""
    data = open_data(folder, "pack", str(folder / "documents.jsonl"))
    [source] = data.sources
    assert source.num_units == 34
    documents, position = fed_over(data, [(3, world_size), (1, 1), (13, world_size)], global_batch_size=2)
    assert position.consumed == 34
    assert sorted(documents) == ALL


@pytest.mark.parametrize("source", ["documents.jsonl", "chat.jsonl"])
@pytest.mark.parametrize("unit", ["pack", "document"])
def test_the_loss_of_a_step_is_the_same_on_1_to_8_ranks(folder, unit, source):
    """In float64: rows of any length and labels of any number, divided by all trained labels of the step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double()
    kind = "chat:" if source == "chat.jsonl" else ""
    data = open_data(folder, unit, f"{kind}{folder / source}")
    position = data.start(seed=0, global_batch_size=13)
    losses = []
    for world_size in range(1, 9):
        batches = [batch for r in range(world_size) for batch in data.micro_batches(position, r, world_size, 3)]
        num_tokens = sum(batch.num_trained() for batch in batches)
        with torch.no_grad():
            total = sum(loss_sum(model, batch) for batch in batches)
        losses.append((total / num_tokens).item())
    assert max(losses) - min(losses) < 1e-12
    assert 4 < losses[0] < 7


def loss_sum(model, batch):
    logits = model(input_ids=batch.inputs, position_ids=batch.position_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


def train_on_rank(rank, root, changes):
    train(tiny_config(root, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["pack", "document"])
def test_three_ranks_train_rows_of_any_fill_as_one(pristine, tmp_path, unit):
    """5 units on 3 ranks, batches of 1: the ranks have 2, 2 and 1 of them, and as many labels as fall to each."""
    lines = []
    for world_size in (1, max(2, at_most(3))):
        root = shutil.copytree(pristine, tmp_path / str(world_size))
        changes = {"unit": unit, "seq_len": 100, "global_batch_size": 5, "micro_batch_size": 1}
        run_ranks(world_size, train_on_rank, root, changes)
        assert surviving_samples(root) == list(range(20))
        lines.append(read_lines(root / "metrics.jsonl"))
    for one, three in zip(*lines, strict=True):
        assert three["tokens"] == one["tokens"] < 500
        assert three["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert three["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
