"""8-bit matrix products: close to the run without them, and nothing of them in a checkpoint."""

import subprocess
import sys

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import ckptool
from ckptool import DataPosition, DataSource, UnsupportedError, UsageError
from tests.trainer.test_exactly_once import run_on
from tests.trainer.test_selective import Products
from tests.trainer.tiny import DEVICE, at_most, read_lines, run, tiny_config
from trainer import fp8
from trainer.model import build_meta_model, checkpoint_activations, recompute_buffers

pytest.importorskip("torchao.float8", reason="pip install ckptool[fp8]")
from torchao.float8.float8_linear import Float8Linear

RECIPES = ("tensorwise", "rowwise")


def converted(root, model_config, recipe="tensorwise"):
    """A model of random weights on the CPU, with 8-bit products."""
    model_config.save_pretrained(root / "converted")
    model = build_meta_model(root / "converted", torch.float32)
    fp8.use_fp8(model, recipe, torch.device("cpu"), pad_tokens=False)
    model.to_empty(device="cpu")
    recompute_buffers(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def layers_in_8_bits(model):
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def llama(**sizes):
    return transformers.LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2} | sizes,
        vocab_size=64,
        num_hidden_layers=2,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_close_to_those_without(root, recipe):
    plain = run(root, steps=4, resume="never")
    (root / "metrics.jsonl").unlink()
    (root / "step-4").rename(root / "plain")
    rounded = run(root, steps=4, resume="never", fp8=recipe)
    for line, one in zip(rounded, plain, strict=True):
        assert line["loss"] != one["loss"]
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-2)
    assert rounded[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-2)
    assert rounded[-1]["loss"] < rounded[0]["loss"] - 0.2


def test_a_checkpoint_is_that_of_a_run_without_and_either_goes_on_from_the_other(root):
    run(root, steps=1)
    run(root, steps=2, fp8="tensorwise")
    run(root, steps=3)
    first, second, third = (ckptool.open_checkpoint(root / f"step-{step}") for step in (1, 2, 3))
    for other in (second, third):
        assert {name: (entry.dtype, entry.shape) for name, entry in other.tensors.items()} == {
            name: (entry.dtype, entry.shape) for name, entry in first.tensors.items()
        }
        assert other.objects.keys() == first.objects.keys()
    assert ckptool.verify(root / "step-2").exit_code == 0
    ckptool.export("step-2", root=root, out=root / "out")
    _, found = transformers.AutoModelForCausalLM.from_pretrained(root / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


def test_sharded_ranks_compute_what_one_does(root):
    """With one row in a micro-batch, since a scale is that of all tokens of a product."""
    settings = {"fp8": "tensorwise", "micro_batch_size": 1, "steps": 3, "resume": "never"}
    run_on(at_most(2), root, **settings)
    sharded = read_lines(root / "metrics.jsonl")
    (root / "metrics.jsonl").unlink()
    (root / "step-3").rename(root / "sharded")
    for line, one in zip(sharded, run(root, **settings), strict=True):
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert line["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens_can_be_trained(root, recipe):
    """The gradient of a weight is a product over tokens, which the kernels take by 16."""
    plain = run(root, steps=1, seq_len=9, resume="never")
    (root / "step-1").rename(root / "plain")
    *_, rounded = run(root, steps=1, seq_len=9, resume="never", fp8=recipe)
    assert rounded["loss"] == pytest.approx(plain[0]["loss"], rel=5e-3)


def test_rows_of_other_lengths_and_a_loader_of_one_s_own_are_padded():
    windows = DataSource("text", 10)
    loader = DataSource("mine", 1, {"kind": "loader", "path": "mine:make"})
    asked = [(16, windows), (24, windows), (16, loader)]
    positions = [(size, DataPosition.begin([one], seq_len=size, seed=0, global_batch_size=1)) for size, one in asked]
    assert [fp8.has_odd_tokens(*each) for each in positions] == [False, True, True]


@pytest.mark.parametrize("change", [{"cpu_offload": True}, {"activation_checkpointing": "block"}])
def test_offloading_and_recomputation_change_no_number(root, change):
    whole = run(root, steps=2, resume="never", fp8="rowwise")
    (root / "metrics.jsonl").unlink()
    (root / "step-2").rename(root / "whole")
    other = run(root, steps=2, resume="never", fp8="rowwise", **change)
    assert other[0]["loss"] == whole[0]["loss"]
    assert other[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)
    # An optimizer on the host of a GPU rounds in its own way, and casts to 8 bits make more of it.
    assert other[1]["loss"] == pytest.approx(whole[1]["loss"], rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_checkpointing_keeps_the_same_products(root, recipe):
    counts, gradients = {}, {}
    for how in ("none", "selective"):
        model = converted(root, llama(), recipe)
        if how == "selective":
            checkpoint_activations(model, selective=True)
        with Products() as seen:
            model(input_ids=torch.arange(32).reshape(2, 16), use_cache=False).logits.sum().backward()
        counts[how] = seen.counts
        gradients[how] = [parameter.grad for parameter in model.parameters()]
    # In each of two layers one half of the MLP; and its last product, since torchao says what its backward pass needs
    # only after it. Compiled blocks leave that out.
    assert counts["selective"] - counts["none"] == {(32, 112): 2, (112, 32): 2}
    assert all(torch.equal(one, other) for one, other in zip(*gradients.values(), strict=True))


def test_compiled_blocks_recompute_one_product_under_selective_checkpointing(root):
    """The graphs of a block's forward and backward pass: of 7 products forward 6 are kept, or not asked for again."""
    num_products = []

    def count(graph, inputs):
        num_products.append(sum("mm" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph)

    model = converted(root, llama())
    checkpoint_activations(model, selective=True)
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    block = model.model.layers[0]
    block.compile(backend=backend)
    model(input_ids=torch.arange(32).reshape(2, 16), use_cache=False).logits.sum().backward()
    assert num_products == [7, 14 + 1]


def test_the_head_and_layers_of_odd_dims_are_left_out(root):
    found = layers_in_8_bits(converted(root, llama(intermediate_size=40)))
    assert found == {f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"}


def test_a_router_of_experts_is_left_out(root):
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1}
    config = transformers.AfmoeConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"head_dim": 16, "num_hidden_layers": 2, "num_dense_layers": 1, "vocab_size": 64},
        **sizes,
    )
    model = converted(root, config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear - layers_in_8_bits(model) == {"lm_head", "model.layers.1.mlp.router.gate"}


def test_an_expert_that_all_tokens_share_computes_in_8_bits(root):
    config = transformers.Qwen2MoeConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_hidden_layers": 1, "vocab_size": 64, "num_experts": 16, "moe_intermediate_size": 32},
        shared_expert_intermediate_size=48,
    )
    found = layers_in_8_bits(converted(root, config))
    assert {f"model.layers.0.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")} <= found


def test_a_model_without_such_layers_is_refused(root):
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no linear layer that 8 bits fit"):
        converted(root, transformers.GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64))


def test_older_gpus_are_refused_by_name():
    fp8.check_gpu("NVIDIA H200", (9, 0))
    fp8.check_gpu("NVIDIA L4", (8, 9))
    with pytest.raises(UnsupportedError, match=r"A100 has no 8-bit matrix products: .* 8\.0, and 8\.9 is needed"):
        fp8.check_gpu("NVIDIA A100", (8, 0))


@pytest.mark.parametrize(("change", "other"), [({"lora_rank": 4}, "--lora-rank"), ({"tp": 2}, "--tp")])
def test_what_it_can_not_be_had_with_is_refused(root, change, other):
    with pytest.raises(UsageError, match=f"--fp8 can't be had with {other}"):
        tiny_config(root, fp8="rowwise", **change).check(num_data_ranks=1)


def test_without_torchao_the_error_says_what_to_install(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UnsupportedError, match="--fp8 tensorwise needs torchao") as error:
        run(root, steps=1, fp8="tensorwise")
    assert "ckptool[fp8]" in error.value.hint


def test_a_run_says_that_it_is_emulated_or_slow(root, capsys):
    run(root, steps=1, fp8="tensorwise")
    said = capsys.readouterr().err
    assert ("emulated on a CPU" in said) == (DEVICE == "cpu")
    assert ("without --compile is slow" in said) == (DEVICE == "cuda")


def test_commands_are_silent_about_what_torchao_can_not_load(root):
    """transformers imports it, whether 8 bits are asked for or not."""
    ckptool.export("base", root=root, out=root / "out")
    code = "from ckptool.cli.main import main; main()"
    command = [sys.executable, "-c", code, "import-hf", str(root / "out"), "again", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not [line for line in done.stderr.splitlines() if "torchao" in line or "Warning" in line or "W1" in line]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks_train_as_plain_ones(root, recipe):
    plain = run(root, steps=2, resume="never", fp8=recipe)
    (root / "metrics.jsonl").unlink()
    (root / "step-2").rename(root / "plain")
    compiled = run(root, steps=2, resume="never", fp8=recipe, compile=True, activation_checkpointing="selective")
    for line, one in zip(compiled, plain, strict=True):
        assert line["loss"] == pytest.approx(one["loss"], rel=5e-3)
