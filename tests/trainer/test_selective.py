"""What selective activation checkpointing runs a second time."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import checkpoint_activations


class Products(TorchDispatchMode):
    """Counts matrix products by (features in, features out) of their weight, and calls of attention."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            self.counts[tuple(args[1].shape)] += 1
        elif "scaled_dot_product" in str(op) and "backward" not in str(op):
            self.counts["attention"] += 1
        return op(*args, **(kwargs or {}))


def forward_products(how):
    """Products of the forward pass and of its recomputation: those with a weight as it is used forward."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(config).train()
    if how != "none":
        checkpoint_activations(model, selective=how == "selective")
    tokens = torch.arange(12).reshape(2, 6)
    with Products() as seen:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return seen.counts, gradients


@pytest.mark.parametrize("how", ["selective", "block"])
def test_kept_products_run_once_and_gradients_are_the_same(how):
    counts, gradients = forward_products(how)
    whole, expected = forward_products("none")
    again = counts - whole
    num_layers = 2
    if how == "selective":
        assert again == {(32, 112): num_layers}  # one half of the MLP
    else:
        assert again["attention"] == num_layers
        assert again[32, 112] == 2 * num_layers
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
