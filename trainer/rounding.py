"""bf16 weights rounded up or down by chance, so that small updates are not lost.

Rounding to the nearest bf16 loses every update below 1/256 of a weight. Rounded by chance, in proportion to what would
be cut off, a weight moves by the right amount on average. Moments are fp32, so a parameter takes 12 bytes with its
gradient, not 16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate

_MANTISSA_BITS_CUT = 16


def chance_key(parameter: torch.Tensor, seed: int, num_steps: int, number: int) -> int:
    """Of the random numbers for this rank's shard of the parameter `number` at step `num_steps`; 56 bits."""
    text = repr((seed, num_steps, number, _place(parameter)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def generator_of(key: int, device: torch.device) -> torch.Generator:
    """The random numbers of a key on a device."""
    return torch.Generator(device).manual_seed(key)


def round_by_chance(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, to one of the two neighbours, the nearer one more likely; what bf16 can hold stays as it is, and so
    does a NaN, to whose bits nothing may be added."""
    bits = exact.view(torch.int32)
    chance = torch.randint(
        1 << _MANTISSA_BITS_CUT, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    cut = (bits + chance) & -(1 << _MANTISSA_BITS_CUT)
    return torch.where(exact.isnan(), exact, cut.view(torch.float32)).bfloat16()


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
