"""Meshes of several axes train as one rank does, and go on from each other's checkpoints."""

import shutil

import pytest
import torch
import transformers

import ckptool
from ckptool import UnsupportedError, UsageError
from tests.spawn import run_ranks
from tests.trainer.test_exactly_once import run_on, train_on_rank
from tests.trainer.tiny import at_most, make_tokenizer, run, surviving_samples
from trainer import parallel
from trainer.model import build_meta_model, ties_of
from trainer.tensor_parallel import _styles_by_module, split_tensors

#: 25 rows of each half of an MLP don't divide by two.
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),  # heads have norms
    "gemma": transformers.Gemma3TextConfig(**SIZES, sliding_window=8),
    "qwen-moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "mixtral": transformers.MixtralConfig(**SIZES | {"intermediate_size": 48}, num_local_experts=4),
}


def make_model(root, name) -> None:
    """A checkpoint `name` of random weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    hf = root / f"{name}-hf"
    model.config.save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    ties = ties_of(model)
    ckptool.save(
        {"model": {key: tensor for key, tensor in model.state_dict().items() if key not in ties}},
        root / name,
        provenance=ckptool.Provenance(tool_version=ckptool.__version__, ties=ties),
        ties={f"model.{alias}": f"model.{canonical}" for alias, canonical in ties.items()},
        side_folder=hf,
    )


@pytest.fixture(scope="module")
def qwen(pristine, tmp_path_factory):
    """A root with the Qwen3 model, never trained in."""
    root = shutil.copytree(pristine, tmp_path_factory.mktemp("qwen") / "root")
    make_model(root, "qwen")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "qwen-moe", "mixtral"])
def test_other_models_train_on_two_ranks_as_on_one_and_resume_each_other(pristine, tmp_path, name):
    root = shutil.copytree(pristine, tmp_path / "root")
    make_model(root, name)
    reference = shutil.copytree(root, tmp_path / "reference")
    # Counting the tokens of experts has no deterministic kernel on GPUs; in processes of their own, since it stays set.
    settings = {"init_from": name, "schedule": "constant", "deterministic": False}
    run_on(2, root, steps=2, **settings)
    lines = run_on(1, root, steps=4, **settings)
    assert [line["world_size"] for line in lines] == [2, 2, 1, 1]
    assert_same_training(lines, run_on(1, reference, steps=4, **settings))


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


def test_a_plan_for_experts_is_refused(tmp_path):
    CONFIGS["qwen-moe"].save_pretrained(tmp_path)
    model = build_meta_model(tmp_path, torch.float32)
    with (
        parallel.joined_ranks("cpu") as ranks,
        pytest.raises(UnsupportedError, match=r"can't do what transformers' plan for Qwen3MoeForCausalLM wants"),
    ):
        split_tensors(model, ranks.mesh, {})


def test_a_model_without_a_plan_is_refused_for_tensor_parallel():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
    with pytest.raises(UnsupportedError, match="no tensor-parallel plan for GPT2LMHeadModel"):
        _styles_by_module(model, 2, {})
