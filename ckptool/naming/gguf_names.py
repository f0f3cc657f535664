"""GGUF names <-> live parameter names, and the config that a GGUF file implies, by transformers' own rules.

transformers knows two ways. Newer architectures have a conversion mapping like those of Hub models. For the others it
asks the `gguf` library for the name of each live parameter, and a small class per architecture undoes what llama.cpp's
converter did to the values (modeling_gguf_pytorch_utils.py). Its loader applies either to a whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as by_name
from transformers.integrations.gguf import utils as by_mapping

from ckptool.core.box import Box
from ckptool.core.provenance import Naming
from ckptool.core.recipes import Found, ReadPart
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.naming.meta_model import DtypeRule
from ckptool.naming.transformers_names import SameBytes, plan_import, settle_import

NAMING = "gguf"

#: No transforms to undo: an export takes those that `save_pretrained` would.
_NAMING = Naming(NAMING)

#: Labels of what only moves values, so that a cast may come before it.
_MOVED = "Permute"
_MOVING = {
    _MOVED,
    *("Concatenate", "ConcatenateRows", "Unsqueeze", "PermuteRows", "PermuteInputFeatures"),
    *("TiledToGroupedRows", "TiledToGroupedInputs"),
}

#: Which of two tensors that make one live tensor comes first, along the outputs of each expert.
_FUSED_ORDER = ("ffn_gate_exps", "ffn_up_exps")
_FUSED_DIM = 1


def gguf_config(file: Path) -> transformers.PreTrainedConfig:
    """The config that transformers makes of a GGUF file's own. Raises UnsupportedError for unknown architectures."""
    try:
        return transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # a strange file makes transformers raise nearly anything
        detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{file}: transformers can't make a config of it: {detail}") from error


def plan_gguf_import(
    model: transformers.PreTrainedModel,
    file: Path,
    architecture: str,
    source: Mapping[str, TensorEntry],
    dtype: str | None,
    same_bytes: SameBytes,
) -> tuple[NamePlan, Found]:
    """Groups that make every live tensor of `model` (on meta) from the float32 tensors of a GGUF file, and recipes for
    those tensors among their sources that the file doesn't have: values that change before a cast.

    Raises MismatchError for tensors that the model has no place for or that it lacks, and for wrong shapes.
    """
    if by_mapping.is_gguf_arch_supported(architecture):
        mapping = by_mapping.get_gguf_conversion_mapping(architecture, model.config)
        names = plan_import(model, source, dtype, same_bytes, mapping)
    else:
        names = settle_import(model, _groups(model, file, architecture, source, dtype), _NAMING, [], same_bytes)
    naming = Naming(NAMING, type(model).__name__, (), transformers.__version__)
    changed = [group for group in names.groups if group.transform and not set(group.label.split(", ")) <= _MOVING]
    recipes = {name: _Made(group, source) for group in changed for name in group.targets}
    plain = [NameGroup((n,), {n: shape}, cast=g.cast) for g in changed for n, shape in g.targets.items()]
    kept = [group for group in names.groups if not any(group is other for other in changed)]
    return dataclasses.replace(names, groups=(*kept, *plain), naming=naming), Found(recipes)


@dataclasses.dataclass(frozen=True)
class _Made:
    """The one target of a group, made whole in float32. These are small: norms, and the like of them."""

    group: NameGroup
    entries: Mapping[str, TensorEntry]

    @property
    def shape(self) -> tuple[int, ...]:
        (shape,) = self.group.targets.values()
        return shape

    @property
    def sources(self) -> tuple[str, ...]:
        return self.group.sources

    def fill(self, read: ReadPart, box: Box, out: torch.Tensor) -> None:
        transform = self.group.transform or dict
        (made,) = transform({name: read(name, Box.whole(self.entries[name].shape)) for name in self.sources}).values()
        out.copy_(made[tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))])


def _groups(
    model: transformers.PreTrainedModel,
    file: Path,
    architecture: str,
    source: Mapping[str, TensorEntry],
    dtype: str | None,
) -> list[NameGroup]:
    """The groups of an architecture whose names the gguf library knows."""
    processor = _processor(file, architecture)
    try:
        live_names = by_name.get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise UnsupportedError(f"{file}: gguf has no names for {model.config.model_type!r}") from error
    members: dict[str, list[str]] = {}
    for name in source:
        # Live, the weights of all experts are parameters themselves, not the `weight` of a module.
        known = name if name in live_names else name.removesuffix(".weight")
        if known in live_names:
            members.setdefault(live_names[known], []).append(name)
    if unknown := set(source) - {name for names in members.values() for name in names}:
        raise MismatchError(
            f"{file}: {type(model).__name__} has no place for {name_some(unknown)}",
            hint="its config may need what these say, so they are not left out",
        )
    rule = DtypeRule(model, dtype)
    return [_group(processor, source, target, names, rule.of(target)) for target, names in members.items()]


def _processor(file: Path, architecture: str) -> Any:
    made = by_name.TENSOR_PROCESSORS.get(architecture, by_name.TensorProcessor)
    return made(config=by_name.load_gguf_checkpoint(str(file))["config"])


def _group(
    processor: Any, source: Mapping[str, TensorEntry], target: str, names: list[str], cast: str | None
) -> NameGroup:
    """A rename where transformers leaves the tensor as it is.

    Found out with an array of zeros that takes no memory: what moves zeros leaves zeros, what computes does not.
    """
    if len(names) > 1:
        return _fused_group(source, target, names, cast)
    (name,) = names
    zeros = numpy.broadcast_to(numpy.float32(0), source[name].shape)
    with numpy.errstate(all="ignore"):
        probe = _processed(processor, name, zeros)
    if probe is zeros:
        return NameGroup((name,), {target: source[name].shape}, cast=cast)

    def undo(tensors: Mapping[str, Any]) -> dict[str, Any]:
        value = tensors[name].to(torch.float32).numpy()
        made = torch.from_numpy(numpy.ascontiguousarray(_processed(processor, name, value)))
        return {target: made.to(tensors[name].dtype)}

    label = type(processor).__name__ if probe.any() else _MOVED
    return NameGroup((name,), {target: tuple(probe.shape)}, undo, label, cast)


def _processed(processor: Any, name: str, value: Any) -> Any:
    # transformers' GPT-2 stores this one tensor away by itself, unchanged.
    return value if name == "output.weight" else processor.process(value, name).weights


def _fused_group(source: Mapping[str, TensorEntry], target: str, names: list[str], cast: str | None) -> NameGroup:
    """Two tensors of all experts that are one in the model: gate, then up."""
    ordered = [name for part in _FUSED_ORDER for name in names if part in name]
    if len(ordered) != len(names) or len(names) != len(_FUSED_ORDER):
        raise MismatchError(f"{name_some(names)} all become {target}")
    shapes = [source[name].shape for name in ordered]
    shape = (shapes[0][0], sum(s[_FUSED_DIM] for s in shapes), *shapes[0][2:])

    def fuse(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {target: torch.cat([tensors[name] for name in ordered], dim=_FUSED_DIM)}

    return NameGroup(tuple(ordered), {target: shape}, fuse, "Concatenate", cast)
