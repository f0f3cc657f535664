"""AdamW's update of all of a rank's shards in one pass over the GPU's memory and one call, in Triton.

Nothing here is bound by arithmetic: for bf16 weights and moments 14 bytes a parameter go by, and what counts is that
they go by once. On many ranks shards are small, and then it counts that the host makes one call and not one for each.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from trainer.adamw_math import Rates, Update

try:  # comes with torch where there are GPUs, and not for every system
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK_SIZE = 1024  # 8 elements a thread: of bf16 what a thread can load at once
_CHUNK_SIZE = 8 * _BLOCK_SIZE  # elements that are updated by one program
_VECTOR_BYTES = 16


def serves(tensor: torch.Tensor) -> bool:
    """True for a weight that the kernel can update: on a GPU for which it can be built, elements in order."""
    return tensor.is_cuda and tensor.is_contiguous() and not failure(tensor.device, tensor.dtype)


@functools.cache
def failure(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel can't be built for weights of this dtype, in one line; "" when it can: it is tried once.

    Triton needs a C compiler and a folder for what it builds, and knows no GPU before Volta.
    """
    if triton is None:
        return "Triton is not installed"
    try:
        # As the usual step has it: what is built here need not be built then.
        weight, grad, mean, square = torch.zeros(4, _CHUNK_SIZE + _VECTOR_BYTES, dtype=dtype, device=device)
        scale = torch.ones((), device=device)
        rates = Rates(beta1=0.9, beta2=0.95, eps=1e-8, of_step=(1.0, 0.0, 1.0), grad_scale=scale)
        for call in prepared([Update(weight, grad, mean, square, rates)]):
            call()
    except Exception as error:  # of Triton's many
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def prepared(updates: list[Update]) -> list[Callable[[], None]]:
    """Calls that do the updates, in fp32, with all that the host has to do for them done. The tensors of an update are
    contiguous and of one shape. Random numbers are of Triton's Philox (Salmon et al., Parallel random numbers: as easy
    as 1, 2, 3, 2011), a function of the key and the element's place."""
    kinds: defaultdict[tuple[Any, ...], list[Update]] = defaultdict(list)
    for update in updates:
        if update.weight.numel():
            kinds[_kind(update)].append(update)
    return [_prepared_alike(alike) for alike in kinds.values()]


def _kind(update: Update) -> tuple[Any, ...]:
    """Of the updates that one call can do."""
    rates = update.rates
    constants = rates.beta1, rates.beta2, rates.eps, rates.grad_scale is not None, update.chance_key is not None
    return update.weight.device, *(tensor.dtype for tensor in update.tensors), *constants


def _prepared_alike(updates: list[Update]) -> Callable[[], None]:
    device, rates = updates[0].weight.device, updates[0].rates
    addresses = [[tensor.data_ptr() for tensor in update.tensors] for update in updates]
    sizes = tuple(update.weight.numel() for update in updates)
    rows = [
        [*where, size, update.chance_key or 0] for where, size, update in zip(addresses, sizes, updates, strict=True)
    ]
    table = _to_device(torch.tensor(rows, dtype=torch.int64), device)
    numbers = _to_device(torch.tensor([update.rates.of_step for update in updates], dtype=torch.float32), device)
    is_aligned = not any(address % _VECTOR_BYTES for where in addresses for address in where)
    chunks = _chunks(sizes, device)

    def call() -> None:
        with torch.cuda.device(device):
            for is_whole, some in zip((True, False), chunks, strict=True):
                if len(some):
                    _update[(len(some),)](
                        *updates[0].tensors,  # for their dtypes
                        table,
                        numbers,
                        some,
                        numbers if rates.grad_scale is None else rates.grad_scale,
                        *(float(number) for number in (1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps)),
                        IS_WHOLE=is_whole,
                        IS_ALIGNED=is_aligned,
                        IS_SCALED=rates.grad_scale is not None,
                        BY_CHANCE=updates[0].chance_key is not None,
                        CHUNK_SIZE=_CHUNK_SIZE,
                        BLOCK_SIZE=_BLOCK_SIZE,
                    )

    return call


@functools.lru_cache(maxsize=8)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(tensor's number, chunk's number) of all whole chunks, and of the shorter ones at the ends; on the device."""
    whole = [
        torch.stack([torch.full((size // _CHUNK_SIZE,), number), torch.arange(size // _CHUNK_SIZE)], dim=1)
        for number, size in enumerate(sizes)
    ]
    ends = [(number, size // _CHUNK_SIZE) for number, size in enumerate(sizes) if size % _CHUNK_SIZE]
    pairs = torch.cat(whole), torch.tensor(ends).view(-1, 2)
    return pairs[0].to(device, torch.int32), pairs[1].to(device, torch.int32)


def _to_device(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that waits for nothing."""
    return made.pin_memory().to(device, non_blocking=True)


def _kernel(function: Any) -> Any:
    return triton.jit(function) if triton is not None else function


@_kernel
def _update(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    weight_like,
    grad_like,
    mean_like,
    square_like,
    table,
    numbers,
    chunks,
    grad_scale_at,
    one_less_beta1,
    beta2,
    one_less_beta2,
    eps,
    IS_WHOLE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    CHUNK_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Update chunk `program_id` of `chunks`. A row of `table` is the addresses of weight, gradient and moments, the
    number of elements and the key; of `numbers`, what the weight is multiplied with, step size and correction."""
    tensor_number = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK_SIZE
    row = table + 6 * tensor_number
    weight_start = tl.load(row).to(tl.pointer_type(weight_like.dtype.element_ty))
    grad_start = tl.load(row + 1).to(tl.pointer_type(grad_like.dtype.element_ty))
    mean_start = tl.load(row + 2).to(tl.pointer_type(mean_like.dtype.element_ty))
    square_start = tl.load(row + 3).to(tl.pointer_type(square_like.dtype.element_ty))
    if IS_ALIGNED:
        weight_start = tl.multiple_of(weight_start, 16)
        grad_start = tl.multiple_of(grad_start, 16)
        mean_start = tl.multiple_of(mean_start, 16)
        square_start = tl.multiple_of(square_start, 16)
    num_elements = tl.load(row + 4)
    kept = tl.load(numbers + 3 * tensor_number)
    step_size = tl.load(numbers + 3 * tensor_number + 1)
    correction = tl.load(numbers + 3 * tensor_number + 2)
    for block in range(CHUNK_SIZE // BLOCK_SIZE):
        place = start + block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = None if IS_WHOLE else place < num_elements
        weight = tl.load(weight_start + place, mask=inside).to(tl.float32)
        grad = tl.load(grad_start + place, mask=inside).to(tl.float32)
        mean = tl.load(mean_start + place, mask=inside).to(tl.float32)
        square = tl.load(square_start + place, mask=inside).to(tl.float32)
        if IS_SCALED:
            grad = tl.div_rn(grad, tl.load(grad_scale_at))
        mean += (grad - mean) * one_less_beta1
        square = square * beta2 + grad * grad * one_less_beta2
        scale = tl.sqrt_rn(tl.div_rn(square, correction)) + eps
        weight = weight * kept - step_size * tl.div_rn(mean, scale)
        tl.store(mean_start + place, mean, mask=inside)
        tl.store(square_start + place, square, mask=inside)
        if BY_CHANCE:
            # To one of the two neighbours that bf16 has, the nearer one more likely: trainer/rounding.py.
            chance = (tl.randint(tl.load(row + 5), place) & 0xFFFF).to(tl.int32)
            bits = weight.to(tl.int32, bitcast=True)
            rounded = ((bits + chance) & -65536).to(tl.float32, bitcast=True)
            weight = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, weight, rounded)  # a NaN stays one
        tl.store(weight_start + place, weight, mask=inside)
