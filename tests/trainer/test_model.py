"""The sharded model is the eager one: ties (field report 4), buffers (5), names, gradients."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from ckptool import NotFoundError, UnsupportedError
from tests.spawn import run_ranks
from tests.trainer.tiny import run, tiny_config
from trainer import parallel, sharding
from trainer.build import build_state
from trainer.data import TrainingData, prepare
from trainer.model import build_meta_model, materialize, model_state, named_blocks, recompute_buffers, ties_of
from trainer.origin import find_origin

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-yarn": transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, sliding_window=8),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt2": transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, bos_token_id=0, eos_token_id=1),
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def hf_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    CONFIGS[request.param].save_pretrained(folder)
    return folder


def test_every_buffer_equals_an_eager_build(hf_folder):
    eager = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(hf_folder))
    wanted = dict(eager.named_buffers())
    model = build_meta_model(hf_folder, torch.float32)
    ties, blocks = ties_of(model), named_blocks(model)
    with parallel.joined_ranks("cpu") as ranks:
        sharding.shard(model, list(blocks.values()), ranks, torch.float32)
        materialize(model, ranks.device, ties)
    persistent = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
    assert set(buffers) == {name for name in wanted if name not in eager.state_dict()}
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in buffers.items())
    assert set(model_state(model, ties)) | set(ties) == set(eager.state_dict())
    assert all(model.get_parameter(alias) is model.get_parameter(name) for alias, name in ties.items())
    assert len(blocks) == 2


def built(rank, root):
    """What this rank holds: elements of parameters, whether the tie is one parameter, and the rotary frequencies."""
    config = tiny_config(root)
    with parallel.joined_ranks("cpu") as ranks:
        state = build_state(config, ranks, find_origin(config), position=None)
    model = state.model
    held = sum(parameter.to_local().numel() for parameter in state.parameters().values())
    return held, model.lm_head.weight is model.model.embed_tokens.weight, model.model.rotary_emb.inv_freq.tolist()


def test_each_of_two_ranks_holds_its_share_the_tie_and_the_right_buffers(pristine):
    eager = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(pristine / "base" / "hf")
    )
    shares, ties, frequencies = zip(*run_ranks(2, built, pristine), strict=True)
    assert sum(shares) == sum(parameter.numel() for parameter in eager.parameters())
    assert max(shares) < 0.6 * sum(shares)
    assert all(ties)
    assert all(found == eager.model.rotary_emb.inv_freq.tolist() for found in frequencies)


def test_a_buffer_that_nothing_recomputes_is_an_error(pristine):
    model = build_meta_model(pristine / "base" / "hf", torch.float32)
    model.model.register_buffer("forgotten", torch.zeros(3, device="meta"), persistent=False)
    model.to_empty(device="cpu")
    with pytest.raises(UnsupportedError, match=r"model\.forgotten"):
        recompute_buffers(model)


@pytest.mark.parametrize("change", [{"activation_checkpointing": "block"}, {"compile": True}])
def test_wrappers_never_reach_the_names(pristine, change):
    config = tiny_config(pristine)
    with parallel.joined_ranks("cpu") as ranks:
        origin = find_origin(config)
        plain = build_state(config, ranks, origin, position=None)
        wrapped = build_state(tiny_config(pristine, **change), ranks, origin, position=None)
    assert list(wrapped.parameters()) == list(plain.parameters())
    assert list(model_state(wrapped.model, wrapped.ties)) == list(model_state(plain.model, plain.ties))
    assert "lm_head.weight" not in model_state(plain.model, plain.ties)
    assert wrapped.model.lm_head.weight is wrapped.model.model.embed_tokens.weight


@pytest.mark.parametrize("how", ["selective", "block"])
def test_activation_checkpointing_changes_no_number(root, tmp_path, how):
    plain = run(root, steps=2)
    (root / "metrics.jsonl").unlink()
    (root / "step-2").rename(tmp_path / "step-2")
    recomputed = run(root, steps=2, activation_checkpointing=how)
    assert [(line["loss"], line["grad_norm"]) for line in recomputed] == [(e["loss"], e["grad_norm"]) for e in plain]


def test_a_step_equals_plain_pytorch_on_the_same_windows(root):
    """One step at a constant rate, without clipping, against AdamW on an unsharded transformers model."""
    [line] = run(root, steps=1, schedule="constant", warmup_steps=0, grad_clip=0.0, global_batch_size=3)
    config = tiny_config(root, global_batch_size=3)
    hf = root / "base" / "hf"
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(hf), dtype=torch.float32
    )
    weights = {"model": {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}}
    dcp.load(weights, checkpoint_id=root / "base", no_dist=True)
    model.load_state_dict(weights["model"])
    prepared = prepare(config.data, config.unit, config.seq_len, hf, root, print)
    data = TrainingData(prepared, config.unit, config.seq_len, hf)
    [batch] = data.micro_batches(data.start(seed=0, global_batch_size=3), rank=0, world_size=1, micro_batch_size=3)
    loss = torch.nn.functional.cross_entropy(model(batch.inputs).logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=str(tmp_path)):
        build_meta_model(tmp_path, torch.float32)


def test_an_unknown_architecture_is_an_error_without_running_its_code(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(UnsupportedError, match=r"nobody-knows|trust_remote_code|custom code"):
        build_meta_model(tmp_path, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "block"])
def test_compiled_blocks_train_as_plain_ones(root, tmp_path, how):
    plain = run(root, steps=2)
    (root / "metrics.jsonl").unlink()
    (root / "step-2").rename(tmp_path / "step-2")
    compiled = run(root, steps=2, compile=True, activation_checkpointing=how)
    for one, other in zip(plain, compiled, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
