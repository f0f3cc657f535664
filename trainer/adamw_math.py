"""One update of AdamW: its numbers, its tensors, and what is done to them, written out in torch's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rates(NamedTuple):
    """The numbers of one update of AdamW. `of_step` are those that change from step to step: what the weight is
    multiplied with, the step size, and what the squares are divided by, the latter two corrected for moments that have
    begun at 0; floats, or a tensor of all three. Gradients are divided by `grad_scale`, a scalar of fp32."""

    beta1: float
    beta2: float
    eps: float
    of_step: tuple[float, float, float] | torch.Tensor
    grad_scale: torch.Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any], num_steps: int) -> Rates:
        """Those of a parameter group of the optimizer at its step `num_steps`, counted from 1.

        The optimizer's attribute `grad_scale`, if it is set, has the meaning that it has for torch's fused optimizers.
        """
        beta1, beta2 = group["betas"]
        kept, step_size = 1 - group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**num_steps)
        of_step = (kept, step_size, 1 - beta2**num_steps)
        return cls(beta1, beta2, group["eps"], of_step, getattr(optimizer, "grad_scale", None))


@dataclass(frozen=True)
class Update:
    """One step of AdamW of one tensor. All but `grad` are changed in place.

    With a `chance_key` a bf16 weight is rounded by chance, with random numbers of that key, and to the nearest without.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    rates: Rates
    chance_key: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.weight, self.grad, self.mean, self.square


def adamw_update(
    weight: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, rates: Rates
) -> torch.Tensor:
    """The weight after one step of AdamW, in fp32. `grad` is fp32; both moments are fp32 and updated in place."""
    kept, step_size, correction = rates.of_step
    if rates.grad_scale is not None:
        grad = grad / rates.grad_scale
    mean.lerp_(grad, 1 - rates.beta1)
    square.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    scale = (square / correction).sqrt_().add_(rates.eps).div_(step_size)
    return (weight.float() * kept).addcdiv_(mean, scale, value=-1)
