"""AdamW's update of a shard in one pass over the GPU's memory, in Triton.

Nothing here is bound by arithmetic: for bf16 weights and moments 14 bytes a parameter go by. torch's fused AdamW takes
about half as long again as that, and clipping the gradients before it another 4 bytes a parameter and pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainer.adamw import Rates

try:  # comes with torch where there are GPUs, and not for every system
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK_SIZE = 1024  # 8 elements a thread: of bf16 what a thread can load at once


def serves(tensor: torch.Tensor) -> bool:
    """True for a tensor that the kernel can update: on a GPU for which there is Triton, elements in order."""
    return triton is not None and tensor.is_cuda and tensor.is_contiguous()


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    rates: Rates,
    chance_key: int | None = None,
) -> None:
    """One step of AdamW, in fp32, on contiguous tensors of one shape; all but `grad` are changed in place.

    With a `chance_key` a bf16 weight is rounded by chance, with random numbers of that key (Salmon et al., Parallel
    random numbers: as easy as 1, 2, 3, 2011: Philox), and to the nearest without.
    """
    num_elements = weight.numel()
    if not num_elements:
        return
    kept, step_size, correction = rates.of_step
    with torch.cuda.device(weight.device):
        _update[(triton.cdiv(num_elements, _BLOCK_SIZE),)](
            weight,
            grad,
            mean,
            square,
            weight if rates.grad_scale is None else rates.grad_scale,
            num_elements,
            *(float(number) for number in (kept, step_size, correction, rates.beta1, rates.beta2, rates.eps)),
            chance_key or 0,
            IS_SCALED=rates.grad_scale is not None,
            BY_CHANCE=chance_key is not None,
            BLOCK_SIZE=_BLOCK_SIZE,
        )


def _kernel(function: Any) -> Any:
    # The key is another one for each parameter and step: compiled once, not again where it can be divided by 16.
    return triton.jit(function, do_not_specialize=["chance_key"]) if triton is not None else function


@_kernel
def _update(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    weight_start,
    grad_start,
    mean_start,
    square_start,
    grad_scale_at,
    num_elements,
    kept,
    step_size,
    correction,
    beta1,
    beta2,
    eps,
    chance_key,
    IS_SCALED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = place < num_elements
    weight = tl.load(weight_start + place, mask=inside).to(tl.float32)
    grad = tl.load(grad_start + place, mask=inside).to(tl.float32)
    mean = tl.load(mean_start + place, mask=inside).to(tl.float32)
    square = tl.load(square_start + place, mask=inside).to(tl.float32)
    if IS_SCALED:
        grad = tl.div_rn(grad, tl.load(grad_scale_at))
    mean += (grad - mean) * (1 - beta1)
    square = square * beta2 + grad * grad * (1 - beta2)
    scale = tl.sqrt_rn(tl.div_rn(square, correction)) + eps
    weight = weight * kept - step_size * tl.div_rn(mean, scale)
    tl.store(mean_start + place, mean, mask=inside)
    tl.store(square_start + place, square, mask=inside)
    if BY_CHANCE:
        # To one of the two neighbours that bf16 has, the nearer one more likely: trainer/rounding.py.
        chance = (tl.randint(chance_key, place) & 0xFFFF).to(tl.int32)
        bits = (weight.to(tl.int32, bitcast=True) + chance) & -65536
        weight = bits.to(tl.float32, bitcast=True)
    tl.store(weight_start + place, weight, mask=inside)
