"""AdamW for bf16 weights: computed in fp32, and rounded up or down by chance, so that small updates are not lost.

Rounding to the nearest bf16 loses every update below 1/256 of a weight. Rounded by chance, in proportion to what would
be cut off, a weight moves by the right amount on average. Moments are fp32, so a parameter takes 10 bytes, not 16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

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
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, group, number)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        state["step"] += 1
        weight, mean, square = (_local(t) for t in (parameter.data, state["exp_avg"], state["exp_avg_sq"]))
        grad = _local(cast(torch.Tensor, parameter.grad)).float()
        done, (beta1, beta2) = int(state["step"]), group["betas"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        exact = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        scale = (square / (1 - beta2**done)).sqrt_().add_(group["eps"])
        exact.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**done))
        generator = torch.Generator(weight.device)
        key = repr((self._seed, done, number, _place(parameter))).encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest()))
        weight.copy_(round_by_chance(exact, generator))


def round_by_chance(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, to one of the two neighbours, the nearer one more likely; what bf16 can hold stays as it is."""
    bits = exact.view(torch.int32)
    chance = torch.randint(
        1 << _MANTISSA_BITS_CUT, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    cut = (bits + chance) & -(1 << _MANTISSA_BITS_CUT)
    return cut.view(torch.float32).bfloat16()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(parameter: torch.Tensor) -> tuple[int, ...]:
    """The coordinate along the mesh axes that split the parameter; copies have the same. Without a mesh that of the
    only shard, so that a rank alone rounds in the same way with FSDP2 and without."""
    if not isinstance(parameter, DTensor):
        return (0,)
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    pairs = zip(coordinate, parameter.placements, strict=True)
    return tuple(place for place, placement in pairs if not isinstance(placement, Replicate))
