"""AdamW for bf16 weights: computed in fp32, and rounded up or down by chance, so that small updates are not lost.

Rounding to the nearest bf16 loses every update below 1/256 of a weight. Rounded by chance, in proportion to what would
be cut off, a weight moves by the right amount on average. Moments are fp32, so a parameter takes 12 bytes with its
gradient, not 16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

_MANTISSA_BITS_CUT = 16


class RoundedAdamW(torch.optim.AdamW):
    """The update of torch's AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2).

    The random numbers are a function of the seed, the step, the parameter's number and the shard's place, so a resumed
    run rounds as it would have, and copies of a shard stay equal.
    """

    def __init__(self, params: Iterable[Any], seed: int, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        update_each(self, self._update)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        state["step"] += 1
        weight, mean, square = (local_part(t) for t in (parameter.data, state["exp_avg"], state["exp_avg_sq"]))
        grad = local_part(cast(torch.Tensor, parameter.grad)).float()
        done = int(state["step"])
        exact = adamw_update(weight, grad, mean, square, Rates.of(group, done))
        weight.copy_(round_by_chance(exact, chance_of(parameter, self._seed, done, number)))


def update_each(
    optimizer: torch.optim.Optimizer, update: Callable[[torch.nn.Parameter, dict[str, Any], int], None]
) -> None:
    """Call `update` for each parameter that has a gradient, with its group and its number, counted from 1."""
    numbered = enumerate(((p, group) for group in optimizer.param_groups for p in group["params"]), start=1)
    for number, (parameter, group) in numbered:
        if parameter.grad is not None:
            update(parameter, group, number)


class Rates(NamedTuple):
    """The numbers of one update of AdamW. `of_step` are those that change from step to step: what the weight is
    multiplied with, the step size, and what the squares are divided by, the latter two corrected for moments that have
    begun at 0; floats, or a tensor of all three."""

    beta1: float
    beta2: float
    eps: float
    of_step: tuple[float, float, float] | torch.Tensor

    @classmethod
    def of(cls, group: dict[str, Any], num_steps: int) -> Rates:
        """Those of a parameter group at its step `num_steps`, counted from 1."""
        beta1, beta2 = group["betas"]
        kept, step_size = 1 - group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**num_steps)
        return cls(beta1, beta2, group["eps"], (kept, step_size, 1 - beta2**num_steps))


def adamw_update(
    weight: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, rates: Rates
) -> torch.Tensor:
    """The weight after one step of AdamW, in fp32. `grad` is fp32; both moments are fp32 and updated in place."""
    kept, step_size, correction = rates.of_step
    mean.lerp_(grad, 1 - rates.beta1)
    square.mul_(rates.beta2).addcmul_(grad, grad, value=1 - rates.beta2)
    scale = (square / correction).sqrt_().add_(rates.eps).div_(step_size)
    return (weight.float() * kept).addcdiv_(mean, scale, value=-1)


def chance_of(parameter: torch.Tensor, seed: int, num_steps: int, number: int) -> torch.Generator:
    """The random numbers for this rank's shard of the parameter `number` at step `num_steps`."""
    generator = torch.Generator(local_part(parameter).device)
    key = repr((seed, num_steps, number, _place(parameter))).encode()
    generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
    return generator


def round_by_chance(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, to one of the two neighbours, the nearer one more likely; what bf16 can hold stays as it is."""
    bits = exact.view(torch.int32)
    chance = torch.randint(
        1 << _MANTISSA_BITS_CUT, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    cut = (bits + chance) & -(1 << _MANTISSA_BITS_CUT)
    return cut.view(torch.float32).bfloat16()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(parameter: torch.Tensor) -> tuple[int, ...]:
    """The coordinate along the mesh axes that split the parameter; copies have the same. Without a mesh that of the
    only shard, so that a rank alone rounds in the same way with FSDP2 and without."""
    if not isinstance(parameter, DTensor):
        return (0,)
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, parameter.placements, strict=True)
    return tuple(place for place, placement in pairs if not isinstance(placement, Replicate))
