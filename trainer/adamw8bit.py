"""AdamW whose moments are 8-bit codes: 2 bytes a parameter and a little for scales, where fp32 moments take 8.

The codes are those of trainer/dynamic_code.py. All state is plain tensors that are sharded as their parameter is, a row
with its scales, so a checkpoint of it can be resharded to any world size, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ckptool import UsageError
from trainer.adamw import with_gradients
from trainer.adamw_math import Rates, adamw_update
from trainer.dynamic_code import BLOCK_SIZE, DynamicCode, num_blocks
from trainer.rounding import chance_key, generator_of, local_part, round_by_chance

#: Codes (..., BLOCK_SIZE) and scales of blocks.
Coded = tuple[torch.Tensor, torch.Tensor]

#: The keys of the state that only codes have.
MEAN_SCALE, SQUARE_SCALE = "exp_avg_scale", "exp_avg_sq_scale"

#: Elements of a shard that are updated at a time. Each fp32 tensor in between takes 16 MiB of them; a compiled update
#: has only one, and fewer calls are the quicker ones.
SLICE_ELEMENTS = 1 << 22
COMPILED_SLICE_ELEMENTS = 1 << 25


class EightBitAdamW(torch.optim.AdamW):
    """The update of torch's AdamW, in fp32 from moments that are kept as codes between the steps.

    Of a parameter that `has_codes`, `exp_avg` and `exp_avg_sq` are codes (uint8, of its shape), and `exp_avg_scale` and
    `exp_avg_sq_scale` their scales (fp32, of its shape but for a number for each block of the last dim). Other moments
    are fp32. With a `rounding_seed`, bf16 weights are rounded by chance as trainer/rounding.py does it. `compiled`
    makes one kernel of most of an update.
    """

    def __init__(
        self, params: Iterable[Any], rounding_seed: int | None = None, compiled: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, **settings)
        self._seed = rounding_seed
        self._compiled = torch.compile(_update_blocks) if compiled else None
        self._slice_elements = COMPILED_SLICE_ELEMENTS if compiled else SLICE_ELEMENTS

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for parameter, group, number in with_gradients(self):
            self._update(parameter, group, number)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        state["step"] += 1
        done = int(state["step"])
        rates = Rates.of(self, group, done)
        weight, grad = local_part(parameter.data), local_part(cast(torch.Tensor, parameter.grad))
        chance = None
        if self._seed is not None:
            chance = generator_of(chance_key(parameter, self._seed, done, number), weight.device)
        if MEAN_SCALE not in state:
            mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
            exact = adamw_update(weight, grad.float(), mean, square, rates)
            weight.copy_(exact if chance is None else round_by_chance(exact, chance))
            return
        coded = [local_part(state[name]) for name in ("exp_avg", MEAN_SCALE, "exp_avg_sq", SQUARE_SCALE)]
        rows = [tensor.view(-1, tensor.shape[-1]) for tensor in (weight, grad.contiguous(), *coded)]
        for parts in zip(*(t.split(max(1, self._slice_elements // weight.shape[-1])) for t in rows), strict=True):
            self._update_rows(parts, rates, chance)

    def _update_rows(self, rows: Sequence[torch.Tensor], rates: Rates, chance: torch.Generator | None) -> None:
        """Update some rows of weights; `rows` are they, their gradients, and codes and scales of both moments."""
        weight, grad, mean, mean_scale, square, square_scale = rows
        if not len(weight):
            return
        if self._compiled:
            rates = rates._replace(of_step=_tensor_of(rates.of_step, weight.device))
        mean_code, square_code = DynamicCode.signed(weight.device), DynamicCode.unsigned(weight.device)
        exact, *moments = (self._compiled or _update_blocks)(
            _as_blocks(weight),
            _as_blocks(grad),
            (_as_blocks(mean, mean_code.zero), mean_scale.view(-1)),
            (_as_blocks(square, square_code.zero), square_scale.view(-1)),
            (mean_code, square_code),
            rates,
        )
        exact = _as_rows(exact, weight)
        weight.copy_(exact if chance is None else round_by_chance(exact, chance))
        for (codes, scales), into, scales_into in zip(moments, (mean, square), (mean_scale, square_scale), strict=True):
            into.copy_(_as_rows(codes, into))
            scales_into.copy_(scales.view_as(scales_into))


def new_moments(name: str, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Moments of 0 for a parameter, sharded as it is. Raises UsageError when blocks would be cut by its sharding."""
    if not has_codes(parameter):
        return {key: torch.zeros_like(parameter, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
    columns = local_part(parameter).shape[-1]
    if columns != parameter.shape[-1] and columns % BLOCK_SIZE:
        raise UsageError(
            f"--optimizer adamw8bit needs blocks of {BLOCK_SIZE}, and --tp leaves a rank {columns} columns of {name}",
            hint="a smaller --tp, or --optimizer adamw",
        )
    device, moments = torch.device("cpu"), {}
    for key, code in (("exp_avg", DynamicCode.signed(device)), ("exp_avg_sq", DynamicCode.unsigned(device))):
        moments[key] = torch.full_like(parameter, code.zero, dtype=torch.uint8)
        moments[f"{key}_scale"] = _new_scales(parameter)
    return moments


def has_codes(parameter: torch.Tensor) -> bool:
    """True for matrices whose rows fill a block: a matter of the whole shape, and so the same on any world size."""
    return parameter.ndim >= 2 and parameter.shape[-1] >= BLOCK_SIZE


def _new_scales(parameter: torch.nn.Parameter) -> torch.Tensor:
    local = local_part(parameter)
    scales = torch.zeros(*local.shape[:-1], num_blocks(local.shape[-1]), device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], num_blocks(parameter.shape[-1])))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.to(local.device)  # from_local brings what is offloaded to the mesh's device


@functools.lru_cache(maxsize=4)
def _tensor_of(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """What changes with each step, on the device: compiled code would be made anew for other numbers."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _as_blocks(rows: torch.Tensor, zero: int = 0) -> torch.Tensor:
    """(rows, columns) -> (blocks, BLOCK_SIZE), a short block at the end of each row filled up with `zero`."""
    short = -rows.shape[1] % BLOCK_SIZE
    return (functional.pad(rows, (0, short), value=zero) if short else rows).view(-1, BLOCK_SIZE)


def _as_rows(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_as_blocks` for rows of the shape of `like`."""
    return blocks.view(len(like), -1)[:, : like.shape[1]]


def _update_blocks(
    weight: torch.Tensor,
    grad: torch.Tensor,
    mean: Coded,
    square: Coded,
    codes: tuple[DynamicCode, DynamicCode],
    rates: Rates,
) -> tuple[torch.Tensor, Coded, Coded]:
    """The new weights of some blocks, in fp32, and codes and scales of their new moments."""
    mean_code, square_code = codes
    exact_mean, exact_square = mean_code.dequantize(*mean), square_code.dequantize(*square)
    exact = adamw_update(weight, grad.float(), exact_mean, exact_square, rates)
    return exact, mean_code.quantize(exact_mean), square_code.quantize(exact_square)
