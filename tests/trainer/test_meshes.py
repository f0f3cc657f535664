"""Meshes of several axes train as one rank does, and go on from each other's checkpoints."""

import shutil

import pytest
import torch
import transformers

import ckptool
from ckptool import UnsupportedError, UsageError
from tests.spawn import run_ranks
from tests.trainer.test_exactly_once import train_on_rank
from tests.trainer.tiny import at_most, make_tokenizer, run, surviving_samples
from trainer.model import build_meta_model, ties_of
from trainer.tensor_parallel import _styles_by_module


def make_qwen(root) -> None:
    """A tied Qwen3, whose heads have norms; 25 rows of each half of an MLP don't divide by two."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    model = transformers.Qwen3ForCausalLM(config)
    hf = root / "qwen-hf"
    model.config.save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    ckptool.save(
        {"model": {name: tensor for name, tensor in model.state_dict().items() if name not in ties}},
        root / "qwen",
        provenance=ckptool.Provenance(tool_version=ckptool.__version__, ties=ties),
        ties={f"model.{alias}": f"model.{canonical}" for alias, canonical in ties.items()},
        side_folder=hf,
    )


@pytest.fixture(scope="module")
def qwen(pristine, tmp_path_factory):
    """A root with the Qwen3 model, never trained in."""
    root = shutil.copytree(pristine, tmp_path_factory.mktemp("qwen") / "root")
    make_qwen(root)
    return root


def assert_same_training(lines, expected) -> None:
    for line, one in zip(lines, expected, strict=True):
        assert line["step"] == one["step"]
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_copies_of_shards_and_split_layers_train_as_one_rank_and_resume_each_other(qwen, tmp_path):
    """2 steps on 2x2 with split layers, 2 on 2x2 with copies, 2 on one rank; on two GPUs on 1x2. Field report 23 among
    them."""
    num_ranks = 4 if at_most(4) == 4 else 2
    root = tmp_path / "root"
    shutil.copytree(qwen, root)
    run_ranks(num_ranks, train_on_rank, root, {"init_from": "qwen", "steps": 2, "tp": 2, "schedule": "constant"})
    assert ckptool.open_checkpoint(root / "step-2").provenance.mesh == {"dp": num_ranks // 2, "tp": 2}
    run_ranks(num_ranks, train_on_rank, root, {"steps": 4, "dp_replicate": 2, "schedule": "constant"})
    assert ckptool.open_checkpoint(root / "step-4").provenance.mesh == {"dp_replicate": 2, "dp": num_ranks // 2}
    lines = run(root, steps=6, schedule="constant")
    assert surviving_samples(root) == list(range(36))

    reference = tmp_path / "reference"
    shutil.copytree(qwen, reference)
    assert_same_training(lines, run(reference, init_from="qwen", steps=6, schedule="constant"))


def test_a_world_size_that_can_not_be_cut_so_is_refused(root):
    with pytest.raises(UsageError, match="1 ranks can't be cut into --dp-replicate 2 times --tp 3 parts"):
        run(root, dp_replicate=2, tp=3)


def test_every_module_with_parameters_has_a_style_and_ties_are_split_alike(qwen):
    model = build_meta_model(qwen / "qwen" / "hf", torch.float32)
    styles = _styles_by_module(model, 2, ties_of(model))
    assert styles["lm_head"] == "colwise_gather_output"
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    assert styles["model.norm"] == "replicate"
    assert styles["model.layers.1.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert styles["model.layers.0.mlp.down_proj"] == "rowwise"
    uneven = _styles_by_module(model, 3, ties_of(model))
    assert uneven["lm_head"] == uneven["model.embed_tokens"] == "replicate"


def test_a_model_without_a_plan_is_refused_for_tensor_parallel():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
    with pytest.raises(UnsupportedError, match="no tensor-parallel plan for GPT2LMHeadModel"):
        _styles_by_module(model, 2, {})
