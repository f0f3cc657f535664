"""Which results of a block are kept for its backward pass when the rest is recomputed.

Kept: attention, and matrix products, of two wide ones (the two halves of a gated MLP) the first. A kept product saves
the work of its inner dim for each element, so all products of one inner dim are worth the same, and the wide ones take
the most memory. What comes out of the MLP is only added to the block's input, and no gradient asks for it: not kept.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: Features, in multiples of the block's width, from which a product counts as wide.
_WIDE = 2

_ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}


def selective_contexts(hidden_size: int) -> Callable[[], Any]:
    """The `context_fn` of torch's checkpoint, for blocks of `hidden_size` features."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(functools.partial(_policy, hidden_size, Counter()))

    return contexts


def _policy(hidden_size: int, num_wide: Counter[bool], context: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    if op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if op in _PRODUCTS and _is_kept(args[_PRODUCTS[op] + 1], hidden_size, num_wide, context.is_recompute):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(weight: torch.Tensor, hidden_size: int, num_wide: Counter[bool], is_recompute: bool) -> bool:
    """Whether the product with `weight`, (features in, features out), is kept."""
    features_in, features_out = weight.shape
    if features_in > _WIDE * hidden_size:
        return False
    if features_out <= _WIDE * hidden_size:
        return True
    num_wide[is_recompute] += 1  # forward and recomputation see the same products in the same order
    return num_wide[is_recompute] % 2 == 1
