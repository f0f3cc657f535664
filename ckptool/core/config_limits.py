"""Whether a model config can belong to the weights beside it, told before anything is built from it.

transformers builds what a config says: a billion layers, or a label for each of a billion classes, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptool.errors import DamagedError

#: Numbers of layers. Each has a tensor of its own, but for the few models that share them: so a floor.
_LAYERS = re.compile(r"(layers?|blocks?|depths?|stages?)$")
MIN_LAYER_LIMIT = 256

#: Numbers of other things that may be built one by one, several to a tensor.
_EXPERTS = re.compile(r"experts?$")
MIN_EXPERT_LIMIT = 1 << 14
_PARTS = re.compile(r"(^|_)num_|^n_|heads?$|labels?$|groups?$")
MIN_PART_LIMIT = 1 << 16

#: Lengths of tensor dims. The floor is for what no tensor has to be as long as, such as a number of positions.
_LENGTHS = re.compile(r"size|dim|width|length|channels|positions|embeddings|d_model|d_ff|n_embd")
MIN_LENGTH_LIMIT = 1 << 26

_RULES = (
    (_LAYERS, MIN_LAYER_LIMIT),
    (_EXPERTS, MIN_EXPERT_LIMIT),
    (_PARTS, MIN_PART_LIMIT),
)


def check_config(config: dict[str, Any], location: str, *, num_tensors: int = 0, num_bytes: int = 0) -> None:
    """Compare a config's numbers with the weights' `num_tensors` and `num_bytes`; without weights, with the floors.

    Raises DamagedError, naming the first number that is beyond them, and for a config that points to another one.
    """
    if "configuration_files" in config:
        raise DamagedError(f"{location}: the config names other files to take its place")
    for name, number in _numbers(config):
        if _LENGTHS.search(name):
            limit, weights = max(num_bytes, MIN_LENGTH_LIMIT), f"{num_bytes} bytes"
        else:
            floor = next((floor for pattern, floor in _RULES if pattern.search(name)), None)
            if floor is None:
                continue
            limit, weights = max(num_tensors, floor), f"{num_tensors} tensors"
        if number > limit:
            reason = f"but the weights are {weights}" if num_tensors else "more than any model has"
            raise DamagedError(f"{location}: {name} is {number}, {reason}")


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    """Every integer of the config with the key it stands under, however deep."""
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, item) for item in value]
        elif type(value) is int or (isinstance(value, float) and value.is_integer()):
            yield name, int(value)
