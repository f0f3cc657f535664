"""The loss of a batch, without the logits of all its tokens ever being in memory.

With a vocabulary of 128k the logits of 8,192 tokens take 2 GiB, and twice that for each step of the cross-entropy. Here
the head and the cross-entropy are taken some tokens at a time, and their gradient right with them, so nothing is
computed twice. (The way of Hsu et al., Liger Kernel, 2024, arXiv:2410.10989, section 3.2, in plain torch.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from trainer.sharding import fsdp_modules
from trainer.units import IGNORED, MicroBatch

#: Logits that are in memory at a time. On GPUs enough for matrix products at full speed.
CHUNK_ELEMENTS = 1 << 28

_METHOD = "chunked_loss"
_PROBE_TOKENS = 8

#: (logits, labels) -> (sum of the losses, its gradient by the logits).
LossOfLogits = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def batch_loss(model: PreTrainedModel, batch: MicroBatch, device: torch.device) -> torch.Tensor:
    """The sum of the cross-entropy over the trained labels of a batch; chunked where `use_chunks` has been called."""
    inputs: dict[str, Any] = {"input_ids": _on(device, batch.inputs), "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = _on(device, batch.position_ids)
    labels = _on(device, batch.labels).flatten()
    chunked = getattr(model, _METHOD, None)
    if chunked is not None:
        return chunked(labels, **inputs)
    logits = model(**inputs).logits.flatten(0, 1)
    return F.cross_entropy(_widened(logits), labels, ignore_index=IGNORED, reduction="sum")


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device. A copy from memory that isn't pinned would wait for all that a GPU has still to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def use_chunks(model: PreTrainedModel, device: torch.device, compile: bool = False) -> str:
    """Make `batch_loss` chunked for this model, whose weights are loaded; or say why it can't be, in a few words.

    All ranks call it: a forward pass of some tokens shows whether the model's logits are its head's output as it is.
    """
    reason = _why_not(model, device)
    if reason:
        return reason
    of_logits = cast(LossOfLogits, torch.compile(loss_of_logits)) if compile else loss_of_logits
    head = cast(nn.Linear, model.get_output_embeddings())

    def loss_of_hidden(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_loss(hidden, head.weight, labels, of_logits)

    def chunked_loss(labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        hidden = model.base_model(**inputs).last_hidden_state
        return getattr(head, _METHOD)(hidden.flatten(0, -2), labels)

    for module, method in ((head, loss_of_hidden), (model, chunked_loss)):
        setattr(module, _METHOD, method)
        # As a forward pass of that module, where FSDP2 shards it: its weights are gathered for it, once.
        register_fsdp_forward_method(cast(nn.Module, module), _METHOD)
    return ""


def linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, of_logits: LossOfLogits | None = None
) -> torch.Tensor:
    """The summed cross-entropy of the logits `hidden @ weight.T`.

    `hidden` is (tokens, features), `weight` (vocabulary, features), `labels` (tokens,) with IGNORED where nothing is
    trained. The sum is in fp32 (fp64 for fp64 inputs), and so is that of the weight's gradient over the chunks.
    """
    needs_gradient = torch.is_grad_enabled()
    return cast(torch.Tensor, _LinearLoss.apply(hidden, weight, labels, of_logits or loss_of_logits, needs_gradient))


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy over (tokens, vocabulary) logits, and its gradient: softmax minus one-hot."""
    wide = _widened(logits)
    is_trained = labels != IGNORED
    targets = torch.where(is_trained, labels, 0)[:, None]
    log_sum = torch.logsumexp(wide, dim=-1, keepdim=True)
    losses = (log_sum - wide.gather(1, targets)).squeeze(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(wide - log_sum) - (columns == targets).to(wide.dtype)
    gradient = torch.where(is_trained[:, None], gradient, 0)
    return torch.where(is_trained, losses, 0).sum(), gradient.to(logits.dtype)


class _LinearLoss(torch.autograd.Function):
    """`linear_loss`, whose forward pass computes the gradients too; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        of_logits: LossOfLogits,
        needs_gradient: bool,
    ) -> torch.Tensor:
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        of_hidden, of_weight = (needs_gradient and needed for needed in ctx.needs_input_grad[:2])
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        no_sum_yet = torch.empty_like if len(hidden) else torch.zeros_like
        weight_grad = no_sum_yet(weight, dtype=sum_dtype) if of_weight else None
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        num_chunks = math.ceil(hidden.shape[0] * weight.shape[0] / CHUNK_ELEMENTS)
        num_tokens = max(1, math.ceil(hidden.shape[0] / max(1, num_chunks)))  # equal ones, so that one compilation does
        for start in range(0, hidden.shape[0], num_tokens):
            tokens = slice(start, start + num_tokens)
            chunk_loss, logits_grad = of_logits(hidden[tokens] @ weight.T, labels[tokens])
            loss += chunk_loss
            if hidden_grad is not None:
                torch.mm(logits_grad, weight, out=hidden_grad[tokens])
            if weight_grad is not None:
                _add_product(weight_grad, logits_grad.T, hidden[tokens], is_first=start == 0)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            # The scale itself rounded to bf16 would be off by the same factor for all.
            hidden_grad = (hidden_grad.to(scale.dtype) * scale).to(hidden_grad.dtype)
        if weight_grad is not None:
            # Scaled and cast in one pass, with no scaled copy in fp32 between.
            narrow = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
            weight_grad = torch.mul(weight_grad, scale, out=narrow)
        return hidden_grad, weight_grad, None, None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, is_first: bool) -> None:
    """Add `left @ right` to `total`, which may be wider and holds nothing yet before the first one. With CUDA the
    product itself adds, and rounds nothing."""
    if total.is_cuda and torch.version.hip is None and total.dtype != left.dtype:
        torch.addmm(total, left, right, beta=0 if is_first else 1, out_dtype=total.dtype, out=total)
    elif is_first:
        total.copy_(left @ right)
    else:
        total += left @ right


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _why_not(model: PreTrainedModel, device: torch.device) -> str:
    """Why the loss can't be taken from the hidden states and the head's weight; "" when it can."""
    head = model.get_output_embeddings()
    model_name = _bare_class(model).__name__
    if head is None or _bare_class(head) is not nn.Linear or head.bias is not None:
        return f"{model_name}'s head is no plain linear layer"
    num_of_fsdp = int(isinstance(head, FSDPModule))  # it gathers before the head and gives back after it
    if max(len(head._forward_hooks), len(head._forward_pre_hooks)) > num_of_fsdp:
        return "its head is split by --tp, or does more than a linear layer"
    hidden: list[torch.Tensor] = []
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []
    hooks = [
        # Copies, since a model may change them in place.
        model.base_model.register_forward_hook(lambda _, __, output: hidden.append(output[0].clone())),
        head.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0].clone())),
        head.register_forward_hook(lambda _, __, output: left.append(output.clone())),
    ]
    was_training = model.training
    model.eval()
    try:
        vocab_size = model.config.get_text_config().vocab_size
        tokens = (torch.arange(_PROBE_TOKENS, device=device) * 7919 + 17) % vocab_size
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = model(input_ids=tokens[None], use_cache=False).logits
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
        for module in fsdp_modules(model):
            module.reshard()  # what no backward pass follows can stay gathered
    if len(hidden) != 1 or len(entered) != 1 or not torch.equal(hidden[0], entered[0]):
        return f"{model_name} changes the hidden states before its head"
    if not torch.equal(left[0].to(logits.dtype), logits):
        return f"{model_name} changes the logits after its head"
    return ""


def _bare_class(module: nn.Module) -> type:
    """A module's class before FSDP2 made one of it and its own."""
    return type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)
