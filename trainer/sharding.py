"""What FSDP2 shards of a model, and gathers as one."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from trainer.parallel import Ranks

#: Blocks of transformers that return a view, which no code of their models changes in place.
_BLOCKS_WITH_VIEWS = ("OPTDecoderLayer",)


def shard(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    ranks: Ranks,
    compute_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """`fully_shard` each block, embedding and output head, and then the root, which keeps the rest.

    Tied embeddings and head are in the root's group, as torch demands. Gradients are summed over ranks, not averaged,
    because the loss is already divided by the global token count. Without `reshard_after_forward` the blocks' weights
    stay gathered until the backward pass. With `cpu_offload`, weights, gradients and optimizer are on the host, and a
    block's weights come to the device when it runs.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Pinned memory is a thing of GPUs; on a CPU offloading moves nothing.
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    group = functools.partial(fully_shard, mesh=ranks.data_mesh, mp_policy=policy, offload_policy=offload)
    for block in blocks:
        group(block, reshard_after_forward=reshard_after_forward)
    if ends := _embedding_and_head(model):
        embedding, head = ends
        # Its gradient doesn't depend on its weights, and the head's backward pass comes right after its forward.
        cast(FSDPModule, group(embedding)).set_unshard_in_backward(False)
        group(head, reshard_after_forward=False)
    _expect_views(model)
    group(model)
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def _expect_views(model: PreTrainedModel) -> None:
    """Silence torch's warning that a module returns a view, where nothing changes that view in place: it would drop the
    hook by which FSDP2 gathers weights for the backward pass. Under --tp the root returns its logits so, and
    `trainer/loss.py` leaves them as they are."""
    names = "|".join([type(model).__name__, *_BLOCKS_WITH_VIEWS])
    message = rf"FSDP2-wrapped module \(FSDP({names})\) returned a view tensor"
    warnings.filterwarnings("ignore", message, UserWarning)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """What FSDP2 gathers and shards as one, the root first; nothing where the model is whole."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _embedding_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module] | None:
    """Both, where each is a plain layer that shares no parameter with another module.

    Gathered apart from the root, the head comes while the blocks run and its gradient is reduced while theirs are made.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
        return None
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    is_shared = any(uses[id(parameter)] > 1 for end in (embedding, head) for parameter in end.parameters())
    return None if is_shared else (embedding, head)


def gains_nothing_from_sharding(
    model: nn.Module, world_size: int, compute_dtype: torch.dtype, num_micro_steps: int, cpu_offload: bool
) -> bool:
    """True when FSDP2 would only copy: one rank, weights that are stored as they are computed with, and gradients that
    no second micro-step adds to (which it does in fp32)."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return world_size == 1 and dtypes == {compute_dtype} and num_micro_steps == 1 and not cpu_offload


def reduce_gradients(model: nn.Module, enabled: bool) -> None:
    """Say whether the next backward pass reduces the gradients over the ranks, or only accumulates them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
