"""What is different between two checkpoints, in any two formats and shardings."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckptool.core.interfaces import Progress, Source
from ckptool.core.plan import Result
from ckptool.errors import NotFoundError
from ckptool.ops.pairs import Pairs, pair_up, same_object
from ckptool.ops.sources import compare_models_only, open_any
from ckptool.ops.tensor_diff import TensorDiff, diff_tensor
from ckptool.storage.files import Place
from ckptool.storage.store import shown_name

_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Difference(Result):
    """What `diff` found: per tensor in `tensors` (largest difference first), the rest in `details`."""

    equal: bool = True
    tensors: tuple[TensorDiff, ...] = ()

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 3

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "equal": self.equal, "tensors": [tensor.to_json() for tensor in self.tensors]}


def diff(
    one: str | Place,
    other: str | Place,
    *,
    root: Place | None = None,
    keys: str = "*",
    progress: Callable[[int], Progress] | None = None,
) -> Difference:
    """Compare two checkpoints (paths, names under `root`, `latest`) or Hugging Face folders, tensor by tensor.

    `keys` is a glob that names must match. When either side is a folder of safetensors, or only one has another
    library's names, the model's tensors alone are compared, under their live names. Memory stays at a few blocks of
    each side. Raises NotFoundError, DamagedError, UnsafeError, UnsupportedError.
    """
    start = time.monotonic()
    model_only = compare_models_only([one, other], root)
    with (
        contextlib.closing(open_any(one, root, model_only=model_only)) as here,
        contextlib.closing(open_any(other, root, model_only=model_only)) as there,
    ):
        pairs = pair_up(here.manifest, there.manifest, keys, model_only)
        if keys != "*" and not (pairs.both or pairs.only_one or pairs.only_other or pairs.objects):
            hint = "only model.* is compared here" if model_only else "ckptool inspect shows the names"
            raise NotFoundError(f"nothing matches {keys!r}", hint=hint)
        tensors, reshaped = _diff_tensors(here, there, pairs, progress)
        objects = [fqn for fqn in pairs.objects if not same_object(here, there, fqn)]
    details = {
        "other": shown_name(str(other)),
        "only_in_one": list(pairs.only_one),
        "only_in_other": list(pairs.only_other),
        "other_kind": [f for f in pairs.both if f not in here.manifest.tensors or f not in there.manifest.tensors],
        "other_shape": reshaped,
        "other_dtype": [
            {"fqn": t.fqn, "one": t.dtypes[0], "other": t.dtypes[1]} for t in tensors if t.dtypes[0] != t.dtypes[1]
        ],
        "other_objects": objects,
        "num_equal": sum(tensor.equal for tensor in tensors),
        "num_compared": len(tensors),
        "layers": layer_summary(tensors),
    }
    equal = all(tensor.equal for tensor in tensors) and not any(
        details[key] for key in ("only_in_one", "only_in_other", "other_kind", "other_shape", "other_objects")
    )
    notes = tuple(_notes(tensors, model_only))
    return Difference(
        "diff", shown_name(str(one)), None, True, time.monotonic() - start, notes, details, equal, tensors
    )


def layer_summary(tensors: Iterable[TensorDiff]) -> list[dict[str, Any]]:
    """Per layer (a name up to its first number, else its module), the largest of its tensors' differences."""
    layers: dict[str, list[TensorDiff]] = {}
    for tensor in tensors:
        layers.setdefault(layer_of(tensor.fqn), []).append(tensor)
    ordered = sorted(layers.items(), key=lambda item: -max(tensor.size for tensor in item[1]))
    return [
        {
            "layer": layer,
            "num_tensors": len(members),
            "num_different": sum(not tensor.equal for tensor in members),
            "max_abs": _extreme(max, [tensor.max_abs for tensor in members]),
            "relative": _extreme(max, [tensor.relative for tensor in members]),
            "cosine": _extreme(min, [tensor.cosine for tensor in members]),
        }
        for layer, members in ordered
    ]


def layer_of(fqn: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`, `model.lm_head.weight` -> `model.lm_head`."""
    match = _LAYER.match(fqn)
    return match[1] if match else fqn.rpartition(".")[0] or fqn


def _extreme(choose: Callable[..., Any], numbers: list[Any]) -> Any:
    """The largest or smallest of them; None (undefined) as soon as one is."""
    return None if None in numbers else choose(numbers)


def _diff_tensors(
    one: Source, other: Source, pairs: Pairs, progress: Callable[[int], Progress] | None
) -> tuple[tuple[TensorDiff, ...], list[dict[str, Any]]]:
    """The tensors of equal shape compared, largest difference first; and those whose shapes differ."""
    found, reshaped = [], []
    left, right = one.manifest.tensors, other.manifest.tensors
    fqns = [fqn for fqn in pairs.both if fqn in left and fqn in right]
    report = progress(sum(left[fqn].num_bytes for fqn in fqns)) if progress else None
    for fqn in fqns:
        if left[fqn].shape == right[fqn].shape:
            found.append(diff_tensor(one, other, fqn, report))
        else:
            reshaped.append({"fqn": fqn, "one": list(left[fqn].shape), "other": list(right[fqn].shape)})
    return tuple(sorted(found, key=lambda tensor: -tensor.size)), reshaped


def _notes(tensors: Iterable[TensorDiff], model_only: bool) -> Iterable[str]:
    if model_only:
        yield "only model.* is compared: one side is a model as such, or has another library's names"
    num_nan = sum(tensor.num_nan_both for tensor in tensors)
    if num_nan:
        yield f"{num_nan} elements are NaN on both sides and count as equal"
