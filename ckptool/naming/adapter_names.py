"""The names of LoRA matrices in a checkpoint -> those in peft's adapter_model.safetensors.

peft wraps a model (`base_model.model.`) and gives every adapter a name (`lora_A.default.weight`); trainers
may save either or neither. Source: peft/utils/save_and_load.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError, name_some

PEFT_PREFIX = "base_model.model."

_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
_OTHER = re.compile(r"(^|\.)(lora_|modules_to_save\.)")


@dataclass(frozen=True)
class LowRank:
    """The two matrices beside a linear layer: `a` (rank, inputs) and `b` (outputs, rank), by their names."""

    a: str
    b: str
    rank: int


def base_name(name: str) -> str:
    """What the model without an adapter calls a tensor of the base: peft puts its layers around those of the model."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def matrix_names(module: str) -> dict[str, str]:
    """The names in a checkpoint of ours of the matrices beside a module, by side: A and B."""
    return {side: f"{module}.lora_{side}.weight" for side in "AB"}


def is_matrix(name: str) -> bool:
    return _MATRIX.fullmatch(name) is not None


def find_adapter(entries: Mapping[str, TensorEntry]) -> dict[str, LowRank]:
    """Module name -> its matrices. Raises NotFoundError when there is no adapter, UnsupportedError for more than one or
    for kinds other than LoRA on linear layers, DamagedError for matrices that don't go together."""
    found: dict[str, dict[str, str]] = {}
    adapters: set[str] = set()
    others = []
    for name in entries:
        if match := _MATRIX.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = name
            adapters.add(match[3] or "")
        elif _OTHER.search(name):
            others.append(name)
    if others or len(adapters) > 1:
        what = name_some(others) if others else f"adapters {name_some(adapters)}"
        raise UnsupportedError(f"only one adapter of LoRA on linear layers is understood, and there is {what}")
    if not found:
        raise NotFoundError("the checkpoint holds no adapter: no names like lora_A.weight")
    return {module: _pair(module, sides, entries) for module, sides in found.items()}


def _pair(module: str, sides: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> LowRank:
    a, b = (entries[sides[side]].shape if side in sides else () for side in "AB")
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise DamagedError(f"the adapter of {module} is no pair of matrices: {list(a)} and {list(b)}")
    return LowRank(sides["A"], sides["B"], a[0])
