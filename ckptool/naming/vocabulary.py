"""Embeddings and output layers that a trainer padded beyond the config's `vocab_size`, for speed: rows no token has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import transformers

from ckptool.core.tensors import TensorEntry
from ckptool.errors import name_some
from ckptool.naming.groups import NameGroup

#: name -> (rows stored, rows that the config has)
Padded = Mapping[str, tuple[int, int]]


def find_padded(
    model: transformers.PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, int]]:
    """Which of the live tensors with these shapes have more rows than the vocabulary of `model` (on meta), and are as
    the model wants them otherwise."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {}
    for name in _vocabulary_names(model) & set(shapes):
        shape, right = shapes[name], wanted[name]
        if len(shape) == len(right) > 0 and shape[1:] == right[1:] and shape[0] > right[0]:
            found[name] = (shape[0], right[0])
    return found


def cut_entries(entries: Mapping[str, TensorEntry], padded: Padded) -> dict[str, TensorEntry]:
    """The entries as if the padding were not there."""
    return {
        name: replace(entry, shape=(padded[name][1], *entry.shape[1:])) if name in padded else entry
        for name, entry in entries.items()
    }


def cut_sources(group: NameGroup, padded: Padded) -> NameGroup:
    """A group that was planned for the sources without their padding, reading those with it."""
    if not any(name in padded for name in group.sources):
        return group

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        cut = {name: tensor[: padded[name][1]] if name in padded else tensor for name, tensor in tensors.items()}
        if group.transform is not None:
            return dict(group.transform(cut))
        return dict(zip(group.targets, cut.values(), strict=True))

    return replace(group, transform=transform, label=_label(group))


def cut_targets(group: NameGroup, padded: Padded) -> NameGroup:
    """A group whose targets come out without their padding."""
    if not any(name in padded for name in group.targets):
        return group
    targets = {
        name: (padded[name][1], *shape[1:]) if name in padded else shape for name, shape in group.targets.items()
    }

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        if group.transform is not None:
            made = dict(group.transform(tensors))
        else:
            made = dict(zip(group.targets, tensors.values(), strict=True))
        return {name: tensor[: padded[name][1]] if name in padded else tensor for name, tensor in made.items()}

    return replace(group, targets=targets, transform=transform, label=_label(group))


def describe_cut(padded: Padded) -> list[str]:
    """What to tell of it."""
    if not padded:
        return []
    rows = " or ".join(str(number) for number in sorted({stored for stored, _ in padded.values()}))
    kept = min(kept for _, kept in padded.values())
    return [f"{name_some(list(padded))}: cut from {rows} rows to the {kept} of config.json's vocab_size"]


def _label(group: NameGroup) -> str:
    return "cut" if group.transform is None else f"{group.label}, cut"


def _vocabulary_names(model: transformers.PreTrainedModel) -> set[str]:
    """The live names of embeddings and output layers, biases and aliases of ties included."""
    modules: Iterable[Any] = [_asked(model.get_input_embeddings), _asked(model.get_output_embeddings)]
    parameters = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in parameters}
    ties = dict(model.all_tied_weights_keys)
    return names | {alias for alias, name in ties.items() if name in names} | {ties[a] for a in names if a in ties}


def _asked(get: Any) -> Any:
    """Some models have no such layer, and say so by an error."""
    try:
        return get()
    except (NotImplementedError, AttributeError):
        return None
