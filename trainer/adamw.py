"""AdamW with its own update: in one pass on a GPU, and for bf16 weights that are rounded by chance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from trainer import adamw_kernel
from trainer.adamw_math import Rates, Update, adamw_update
from trainer.rounding import chance_key, generator_of, local_part, round_by_chance


class OnePassAdamW(torch.optim.AdamW):
    """The update of torch's AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2), in fp32.

    With a `rounding_seed`, bf16 weights are rounded by chance. The random numbers are a function of the seed, the step,
    the parameter's number and the shard's place, so a resumed run rounds as it would have, and copies of a shard stay
    equal.
    """

    def __init__(self, params: Iterable[Any], rounding_seed: int | None = None, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._seed = rounding_seed
        self._prepared: list[Callable[[], None]] | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        """Do what the next step demands of the host: it takes milliseconds, in which a GPU still computes gradients.

        For the gradients, the `grad_scale` and the rates that are there now.
        """
        updates = [self._update_of(*what) for what in with_gradients(self)]
        if all(adamw_kernel.serves(update.weight) for update in updates):
            self._prepared = adamw_kernel.prepared(updates)
        else:
            self._prepared = [functools.partial(_update_in_parts, update) for update in updates]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self._prepared is None:
            self.prepare()
        for update in self._prepared or ():
            update()
        self._prepared = None
        for parameter, _, _ in with_gradients(self):
            self.state[parameter]["step"] += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forget what is prepared for the gradients."""
        self._prepared = None
        super().zero_grad(set_to_none)

    def _update_of(self, parameter: torch.nn.Parameter, group: dict[str, Any], number: int) -> Update:
        state = self.state[parameter]
        done = int(state["step"]) + 1
        return Update(
            weight=local_part(parameter.data),
            grad=local_part(cast(torch.Tensor, parameter.grad)).contiguous(),
            mean=local_part(state["exp_avg"]),
            square=local_part(state["exp_avg_sq"]),
            rates=Rates.of(self, group, done),
            chance_key=None if self._seed is None else chance_key(parameter, self._seed, done, number),
        )


def _update_in_parts(update: Update) -> None:
    weight, grad, mean, square = update.tensors
    exact = adamw_update(weight, grad.float(), mean, square, update.rates)
    key = update.chance_key
    weight.copy_(exact if key is None else round_by_chance(exact, generator_of(key, weight.device)))


def with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any], int]]:
    """Each parameter that has a gradient, with its group and its number, counted from 1."""
    numbered = enumerate(((p, group) for group in optimizer.param_groups for p in group["params"]), start=1)
    for number, (parameter, group) in numbered:
        if parameter.grad is not None:
            yield parameter, group, number
