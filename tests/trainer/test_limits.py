"""Data that the model has no rows for is refused by name: on a GPU the kernel's own error says nothing."""

import json
import pickle

import pytest
import torch
import transformers

from ckptool import MismatchError, UsageError
from tests.trainer.tiny import make_tokenizer, run
from trainer.data import prepare
from trainer.model import check_positions
from trainer.units import IGNORED, MicroBatch, check_tokens

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("config", [{"vocab_size": 100}, {"text_config": {"vocab_size": 100}}])
@pytest.mark.parametrize("kind", ["files", "tokens"])
def test_a_token_beyond_the_models_vocabulary_is_named_before_anything_is_trained(tmp_path, config, kind):
    make_tokenizer().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_bytes(bytes([90, 0] * 10))
    data = (f"tokens:{tmp_path}/a.txt",) if kind == "tokens" else (str(tmp_path / "a.txt"),)
    if kind == "tokens":  # as uint16 all of them are 90
        assert len(prepare(data, "window", 4, tmp_path / "hf", tmp_path, print)) == 1
        (tmp_path / "a.txt").write_bytes(bytes([110, 0] * 10))
    with pytest.raises(MismatchError, match=r"token \d+, and the model has embeddings for 100 tokens") as refused:
        prepare(data, "window", 4, tmp_path / "hf", tmp_path, print)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # rank 0 sends it to the others


@pytest.mark.parametrize(("ids", "named"), [([1, 2, 99], 99), ([1, -7, 2], -7), ([1, 2, 3], None)])
def test_every_batch_is_looked_at_as_streams_and_loaders_are_not_known_beforehand(ids, named):
    row = torch.tensor([ids])
    batch = MicroBatch((4,), row[:, :-1], row[:, 1:].masked_fill(row[:, 1:] == 2, IGNORED))
    if named is None:
        check_tokens([batch], 64)
    else:
        with pytest.raises(MismatchError, match=rf"units \(4,\): token {named}, and the model has embeddings for 64"):
            check_tokens([batch], 64)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(n_positions=48, **SIZES),
        transformers.OPTConfig(max_position_embeddings=48, ffn_dim=64, word_embed_proj_dim=32, **SIZES),
    ],
)
def test_rows_longer_than_a_table_of_positions_are_refused(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert check_positions(model, 48) == ""
    with pytest.raises(UsageError, match="--seq-len 49: the model has a table of 48 positions"):
        check_positions(model, 49)


def test_rows_longer_than_the_config_says_are_said_where_the_model_can_do_them(root, capsys):
    (root / "text" / "long.txt").write_text("x" * 3000)
    run(root, steps=1, seq_len=2100, global_batch_size=1)
    assert "note: --seq-len 2100 is more than the 2048 positions" in capsys.readouterr().err
