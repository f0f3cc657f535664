"""AdamW, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptool import Manifest, MismatchError
from trainer import adamw_kernel
from trainer.adamw import OnePassAdamW
from trainer.adamw8bit import MEAN_SCALE, EightBitAdamW, new_moments
from trainer.rounding import local_part

_BETAS = (0.9, 0.95)

#: Fields of a group that say how torch computes an update, not which.
_WAYS = ("fused", "foreach", "capturable", "differentiable")

#: The values of --optimizer.
NAMES = ("adamw", "adamw8bit")


def build_optimizer(
    parameters: dict[str, torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    rounding_seed: int | None = None,
    name: str = "adamw",
    compiled: bool = False,
) -> torch.optim.AdamW:
    """AdamW in one pass over `parameters` (a tied one once), or one with 8-bit moments, whose update may be `compiled`;
    vectors and scalars don't decay.

    With a `rounding_seed`, bf16 weights are rounded by chance and the moments are fp32, or 8 bits.

    Its state is made at once, as AdamW itself would at the first step. So a checkpoint has a place to be loaded to, and
    saving before the first step needs no trial step (torch's `get_optimizer_state_dict` makes one, and it stays).
    """
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.AdamW
    if name == "adamw8bit":
        optimizer = EightBitAdamW(groups, rounding_seed, compiled, lr=lr, betas=_BETAS)
    elif rounding_seed is not None or all(adamw_kernel.serves(local_part(p)) for p in parameters.values()):
        optimizer = OnePassAdamW(groups, rounding_seed, lr=lr, betas=_BETAS)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=_BETAS, fused=True)
    for fqn, parameter in parameters.items():
        if name == "adamw8bit":
            moments = new_moments(fqn, parameter)
        else:
            dtype = None if rounding_seed is None else torch.float32
            moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        # Ours read the number of steps on the host, where it costs no wait for the GPU.
        where = parameter.device if type(optimizer) is torch.optim.AdamW else torch.device("cpu")
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=where), **moments}
    return optimizer


def kernel_note(optimizer: torch.optim.Optimizer) -> str:
    """What a run should know of its update on a GPU; "" when there is nothing."""
    weight = local_part(optimizer.param_groups[0]["params"][0])
    if not weight.is_cuda or isinstance(optimizer, EightBitAdamW):
        return ""
    reason = adamw_kernel.failure(weight.device, weight.dtype)
    return f"note: AdamW's update is torch's, slower: {reason}" if reason else ""


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Any]:
    """The layout of torch's `get_optimizer_state_dict`: state by parameter name, groups that list names.

    Tensors share the optimizer's memory, so that loading into them restores it.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    state = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
    return {"state": state, "param_groups": groups}


def check_same_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], stored: Manifest
) -> None:
    """Raises MismatchError when a checkpoint's moments are codes and the optimizer's not, or the other way; or those of
    bf16 weights fp32, as rounding by chance has them, and the optimizer's not, or the other way."""
    has_codes = any(MEAN_SCALE in state for state in optimizer.state.values())
    held_codes = any(fqn.startswith("optim.") and fqn.endswith(f".{MEAN_SCALE}") for fqn in stored.tensors)
    if has_codes != held_codes:
        theirs, ours = NAMES[held_codes], NAMES[has_codes]
        raise MismatchError(
            f"{stored.location} is of a run with --optimizer {theirs}, and this one has {ours}: other moments",
            hint=f"--optimizer {theirs} goes on with it; its weights alone: --init-from it, and another --root",
        )
    for parameter, fqn in _bf16_weights(optimizer, parameters):
        moment = stored.tensors.get(f"optim.state.{fqn}.exp_avg")
        held = str(optimizer.state[parameter]["exp_avg"].dtype).removeprefix("torch.")
        if moment is not None and moment.dtype != held and {moment.dtype, held} == {"bfloat16", "float32"}:
            was = "with" if moment.dtype == "float32" else "without"
            flag = "--stochastic-rounding" if was == "with" else "--no-stochastic-rounding"
            raise MismatchError(
                f"{stored.location} is of a run {was} --stochastic-rounding: its moments are {moment.dtype}",
                hint=f"{flag} goes on with it; its weights alone: --init-from it, and another --root",
            )


def _bf16_weights(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
) -> list[tuple[torch.nn.Parameter, str]]:
    return [(p, fqn) for fqn, p in parameters.items() if p.dtype == torch.bfloat16 and p in optimizer.state]


def restore_groups(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    saved: list[dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    """Take over the saved groups' fields. What this run was told (weight decay) wins, and a difference is said. The way
    in which torch computes an update stays this run's: the one before may have been on another device.

    Raises MismatchError when the groups hold other parameters than the optimizer's.
    """
    current = optimizer_state(optimizer, parameters)["param_groups"]
    if [group["params"] for group in saved] != [group["params"] for group in current]:
        raise MismatchError("the checkpoint's optimizer groups hold other parameters than this model's")
    for group, old in zip(optimizer.param_groups, saved, strict=True):
        told = {"params": group["params"], "weight_decay": group["weight_decay"]}
        if old["weight_decay"] != group["weight_decay"]:
            say(f"note: weight decay {old['weight_decay']} in the checkpoint, {group['weight_decay']} from now on")
        group.update({name: value for name, value in old.items() if name not in _WAYS})
        group.update(told)
