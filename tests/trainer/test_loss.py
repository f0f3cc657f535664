"""The chunked loss is the plain one: values and gradients, tied and sharded, and a model that can't have it is told."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from tests.spawn import run_ranks
from tests.trainer.tiny import run
from trainer import loss
from trainer.loss import batch_loss, linear_loss, loss_of_logits, use_chunks
from trainer.model import named_blocks
from trainer.units import IGNORED, MicroBatch

SIZES = {
    "vocab_size": 65,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def make_model(kind="Llama", **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def make_batch():
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, dims=1)
    labels[0, :5] = labels[1, -1] = IGNORED
    return MicroBatch((0, 1), tokens, labels)


def loss_and_gradients(model, device=torch.device("cpu")):  # noqa: B008
    model.zero_grad()
    value = batch_loss(model, make_batch(), device) / 7
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return value.item(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


def assert_equal(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-13)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("num_labels", [24, 5, 0])
def test_gradients_are_those_of_the_plain_loss(monkeypatch, num_labels):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * 65)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(65, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.where(torch.arange(24) < num_labels, torch.randint(0, 65, (24,), generator=generator), IGNORED)
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    wanted = torch.autograd.grad(plain * 0.3, (hidden, weight))
    chunked = linear_loss(hidden, weight, labels)
    found = torch.autograd.grad(chunked * 0.3, (hidden, weight))
    torch.testing.assert_close(chunked, plain, rtol=1e-13, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_number_of_labels_is_not_rounded_to_bf16():
    """1 / 300 would be 0.2 % less. What is rounded element by element cancels out along the exact gradient."""
    num_labels = 300
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_labels, 64, generator=generator).bfloat16()
    weight = torch.randn(500, 64, generator=generator).bfloat16()
    labels = torch.randint(500, (num_labels,), generator=generator)

    def plain(hidden, weight):
        return F.cross_entropy((hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)), labels)

    def gradients(loss_of, dtype):
        inputs = [hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()]
        loss_of(*inputs).backward()
        return [tensor.grad.double() for tensor in inputs]

    found = gradients(lambda *inputs: linear_loss(*inputs, labels) / num_labels, torch.bfloat16)
    for one, exact in zip(found, gradients(plain, torch.float64), strict=True):
        assert (one * exact).sum().item() / exact.square().sum().item() == pytest.approx(1, abs=5e-4)


def test_never_more_logits_at_a_time_than_a_chunk(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 100)
    sizes = []

    def watched(logits, labels):
        sizes.append(logits.numel())
        return loss_of_logits(logits, labels)

    hidden, weight = torch.randn(24, 4, requires_grad=True), torch.randn(10, 4)
    linear_loss(hidden, weight, torch.zeros(24, dtype=torch.int64), watched).backward()
    assert sum(sizes) == 240
    assert max(sizes) <= 100


def test_a_frozen_head_gets_no_gradient_and_evaluation_computes_none():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(10, 4)
    labels = torch.arange(6)
    linear_loss(hidden, weight, labels).backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not linear_loss(hidden, weight, labels).requires_grad


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_trains_on_the_same_gradients(monkeypatch, tied):
    model = make_model(tie_word_embeddings=tied)
    plain = loss_and_gradients(model)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 5 * 65)
    assert use_chunks(model, torch.device("cpu")) == ""
    assert_equal(loss_and_gradients(model), plain)


@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "Cohere"])
def test_a_model_that_changes_its_logits_keeps_the_plain_loss(kind):
    sizes = {"Granite": {"logits_scaling": 8.0}, "Gemma2": {"final_logit_softcapping": 30.0}}.get(kind, {})
    model = make_model(kind, **sizes)
    wanted = loss_and_gradients(model)
    assert "changes the logits" in use_chunks(model, torch.device("cpu"))
    assert_equal(loss_and_gradients(model), wanted)


class Halved(transformers.LlamaForCausalLM):
    """A model that changes its logits in place."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits.mul_(0.5)
        return output


def test_a_model_that_changes_its_logits_in_place_keeps_it_too():
    torch.manual_seed(0)
    model = Halved(transformers.LlamaConfig(**SIZES)).double()
    assert "changes the logits" in use_chunks(model, torch.device("cpu"))


def test_a_head_that_is_more_than_a_linear_layer_keeps_the_plain_loss():
    model = make_model()
    model.lm_head = nn.Linear(32, 65, bias=True, dtype=torch.float64)
    assert "no plain linear layer" in use_chunks(model, torch.device("cpu"))


def sharded_gradients(rank, tied):
    """The plain and the chunked loss of one FSDP2 model in float64, each with the number of gathers that it took."""
    loss.CHUNK_ELEMENTS = 5 * 65
    model = make_model(tie_word_embeddings=tied)
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    for module in [*named_blocks(model).values(), model]:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    loss_and_gradients(model)
    results = []
    for is_chunked in (False, True):
        if is_chunked:
            assert use_chunks(model, torch.device("cpu")) == ""
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            results.append(loss_and_gradients(model))
        results[-1] += (sum("allgather_base" in event.name for event in trace.events()),)
    return results


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_the_gradients_are_the_same_and_the_head_is_gathered_once(tied):
    whole = loss_and_gradients(make_model(tie_word_embeddings=tied))
    for plain, chunked in run_ranks(2, sharded_gradients, tied):
        assert_equal(chunked[:2], plain[:2])
        for name, gradient in whole[1].items():  # transformers' norms are in fp32, whatever the model
            torch.testing.assert_close(chunked[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)
        assert chunked[2] == plain[2] > 0


def test_a_run_with_either_loss_is_the_same_run(root, tmp_path):
    plain = run(root, steps=2, loss="plain")
    (root / "metrics.jsonl").unlink()
    (root / "step-2").rename(tmp_path / "step-2")
    chunked = run(root, steps=2, loss="chunked", eval_data=(str(root / "text"),), eval_units=4)
    for one, other in zip(plain, chunked, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert chunked[-1]["eval_loss"] == pytest.approx(chunked[-1]["loss"], rel=0.2)


def test_a_batch_without_tokens_has_a_loss_of_0():
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(16, 8, requires_grad=True)
    value = linear_loss(hidden, weight, torch.zeros(0, dtype=torch.long))
    value.backward()
    assert value == 0 and hidden.grad.shape == (0, 8) and not weight.grad.any()
