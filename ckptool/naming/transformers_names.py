"""Hub names <-> live parameter names, by transformers' own conversion mapping, planned on meta tensors.

transformers keeps the rules (`conversion_mapping.py`) and the operations (`core_model_loading.py`); its loader and
saver apply them to a whole state dict. Here the same rules give independent groups, each of which converts alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ckptool.core.provenance import Naming, Provenance
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.naming.meta_model import DtypeRule, relatives
from ckptool.naming.vocabulary import Padded, cut_entries, cut_sources, cut_targets, describe_cut, find_padded

NAMING = "transformers"

#: Have two source tensors the same dtype, shape and bytes?
SameBytes = Callable[[str, str], bool]


def plan_import(
    model: transformers.PreTrainedModel,
    source: Mapping[str, TensorEntry],
    dtype: str | None,
    same_bytes: SameBytes,
    mapping: list[Any] | None = None,
    *,
    may_be_padded: bool = False,
    may_have_more: bool = False,
) -> NamePlan:
    """Groups that make every live tensor of `model` (on meta) from the Hub tensors in `source`.

    `dtype` is the cast wanted (None: keep); `same_bytes(a, b)` compares two source tensors and is asked only where a
    tie is stored twice; `mapping` are the transforms (None: those of the model's Hub form). `may_be_padded` is for what
    a trainer saved: rows beyond the config's vocabulary are cut off. `may_have_more` lets tensors pass that the model
    has no place for. Raises MismatchError for names that don't fit the model, either way, and for wrong shapes.
    """
    rule = DtypeRule(model, dtype)
    if mapping is None:
        mapping = get_model_conversion_mapping(model)
    collected, unexpected = _collect_import(model, mapping, source)
    if not may_have_more:
        _check_needless(model, unexpected)
    groups = [_group(model, source, target, *item, rule.of(target)) for target, item in collected.items()]
    naming = Naming(
        NAMING,
        type(model).__name__,
        tuple(describe(transform) for transform in mapping if transform.was_used()),
        transformers.__version__,
    )
    return settle_import(model, groups, naming, unexpected, same_bytes, may_be_padded=may_be_padded)


def settle_import(
    model: transformers.PreTrainedModel,
    groups: list[NameGroup],
    naming: Naming,
    unexpected: list[str],
    same_bytes: SameBytes,
    *,
    may_be_padded: bool = False,
) -> NamePlan:
    """Ties settled, and every live tensor of the model made with its shape. Raises MismatchError."""
    meta = model.state_dict()
    padded: Padded = {}
    if may_be_padded:
        padded = find_padded(model, {name: shape for group in groups for name, shape in group.targets.items()})
        groups = [cut_targets(group, padded) for group in groups]
    _check_shapes(meta, groups)
    groups, ties, stored, untied, notes = _settle_ties(model, groups, same_bytes)
    _check_complete(meta, groups, ties)
    notes += describe_cut(padded)
    return NamePlan(tuple(groups), naming, ties, stored, untied, tuple(unexpected), tuple(notes), padded)


def plan_export(
    model: transformers.PreTrainedModel,
    live: Mapping[str, TensorEntry],
    provenance: Provenance | None,
    dtype: str | None,
) -> NamePlan:
    """Groups that make the Hub tensors from the live tensors of a checkpoint; the inverse of `plan_import`.

    The transforms reversed are those recorded at import; without a record, those that `save_pretrained` would take.
    Rows beyond the config's vocabulary are cut off. Of a checkpoint that was imported in part, what is there is made.
    Raises MismatchError when tensors of the model are absent (of a part: some of those that make one), or when this
    transformers lacks a recorded transform.
    """
    padded = find_padded(model, {name: entry.shape for name, entry in live.items()})
    live = cut_entries(live, padded)
    is_part = provenance is not None and bool(provenance.part)
    _check_live_names(model, live, is_part)
    transforms = recorded_transforms(model, provenance)[::-1]
    reverse = [transform.reverse_transform() for transform in transforms]
    renamings = [t for t in reverse if isinstance(t, WeightRenaming)]
    converters = [t for t in reverse if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    collected: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    whole_model = model.state_dict().keys() if is_part else set()
    for name in sorted(live.keys() | whole_model, key=dot_natural_key):
        renamed, pattern = _apply_converters(name, converters)
        if pattern is None:
            collected[_apply_renamings(name, renamings)] = (None, [(name, name)])
        else:
            collected.setdefault(renamed, (by_pattern[pattern], []))[1].append((name, pattern))
    if is_part:
        collected = {target: made for target, made in collected.items() if _is_there(target, made[1], live)}
    rule = DtypeRule(model, dtype)
    groups = [
        cut_sources(_group(model, live, target, converter, members, rule.of(members[0][0]), renamings), padded)
        for target, (converter, members) in collected.items()
    ]
    targets = [name for group in groups for name in group.targets]
    if len(set(targets)) != len(targets):
        clashes = {name for name in targets if targets.count(name) > 1}
        raise MismatchError(f"two live tensors would get one Hub name: {name_some(clashes)}")
    notes = describe_cut(padded)
    if is_part:
        notes.append(f"only a part, {len(live)} tensors of the model: the import left the others out")
    return NamePlan(tuple(groups), Naming(NAMING, type(model).__name__), notes=tuple(notes), padded=padded)


def describe(transform: Any) -> str:
    """A transform's identity in our records: its patterns and the submodule that it is limited to."""
    scope = getattr(transform, "scope_prefix", None)
    return f"{transform!r}@{scope}" if scope else repr(transform)


def _collect_import(
    model: transformers.PreTrainedModel, mapping: list[Any], source: Mapping[str, TensorEntry]
) -> tuple[dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]], list[str]]:
    """Group source names by the first live name they make, in the loader's order; and the names that make none."""
    meta = model.state_dict()
    renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
    converters = [t for t in mapping if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    collected: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    unexpected: list[str] = []
    for name in sorted(source, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, meta)
        if renamed not in meta and name in meta:
            renamed, pattern = rename_source_key(name, [], [], prefix, meta)
        if renamed not in meta:
            unexpected.append(name)
        elif pattern is not None:
            collected.setdefault(renamed, (by_pattern[pattern], []))[1].append((name, pattern))
        elif renamed in collected:
            raise MismatchError(f"{collected[renamed][1][0][0]} and {name} both become {renamed}")
        else:
            collected[renamed] = (None, [(name, name)])
    return collected, unexpected


def _group(
    model: transformers.PreTrainedModel,
    entries: Mapping[str, TensorEntry],
    target: str,
    converter: WeightConverter | None,
    members: list[tuple[str, str]],
    cast: str | None,
    renamings: Sequence[WeightRenaming] = (),
) -> NameGroup:
    """A rename, or a group that runs one of transformers' converters, `renamings` applied to what it makes.

    The shapes of a converter's targets come from running it on meta tensors.
    """
    names = tuple(name for name, _ in members)
    if converter is None:
        return NameGroup(names, {target: entries[names[0]].shape}, cast=cast)

    def convert(tensors: Mapping[str, Any]) -> dict[str, Any]:
        fresh = deepcopy(converter)
        for name, pattern in members:
            fresh.add_tensor(target, name, pattern, tensors[name])
        made = fresh.convert(target, model=model, config=model.config)
        firsts = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {_apply_renamings(name, renamings): tensor for name, tensor in firsts.items()}

    meta = {name: torch.empty(entries[name].shape, device="meta") for name in names}
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    try:
        made = convert(meta)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UnsupportedError(f"{target}: {operations} can't convert {name_some(list(names))}: {error}") from error
    return NameGroup(names, {name: tuple(t.shape) for name, t in made.items()}, convert, operations, cast)


def _check_shapes(meta: Mapping[str, torch.Tensor], groups: list[NameGroup]) -> None:
    for group in groups:
        for name, shape in group.targets.items():
            if name not in meta:
                raise MismatchError(f"{name_some(list(group.sources))} would become {name}, which the model lacks")
            if tuple(meta[name].shape) != shape:
                raise MismatchError(
                    f"{name}: config.json wants shape {list(meta[name].shape)}, the weights give {list(shape)}"
                )


def _check_needless(model: transformers.PreTrainedModel, unexpected: list[str]) -> None:
    """Raise MismatchError for names the model doesn't want, unless they are known to be needless.

    Needless are those that transformers itself ignores, buffers that the model computes (older versions stored
    `position_ids` and each layer's `inv_freq`), and the heads of the same model's other tasks.
    """
    patterns = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    patterns.append(re.compile(r"rotary_emb\.inv_freq$"))
    prefix = f"{model.base_model_prefix}."
    computed = {name.removeprefix(prefix) for name, _ in model.named_buffers()}
    refused = [
        name
        for name in unexpected
        if name.removeprefix(prefix) not in computed and not any(p.search(name) for p in patterns)
    ]
    if refused:
        known = {name.removeprefix(prefix) for relative in relatives(model) for name in relative.state_dict()}
        refused = [name for name in refused if name.removeprefix(prefix) not in known]
    if refused:
        raise MismatchError(
            f"{type(model).__name__} has no place for {name_some(refused)}",
            hint="is config.json the one that belongs to these weights?",
        )


def _settle_ties(
    model: transformers.PreTrainedModel, groups: list[NameGroup], same_bytes: SameBytes
) -> tuple[list[NameGroup], dict[str, str], tuple[str, ...], dict[str, str], list[str]]:
    """Keep one stored tensor per tie: the canonical name, whichever name the source used.

    Returns groups, ties, names that the source stored, pairs found different, notes.
    """
    by_target = {name: group for group in groups for name in group.targets}
    aliases_of: dict[str, list[str]] = {}
    for alias, canonical in dict(model.all_tied_weights_keys).items():
        aliases_of.setdefault(canonical, []).append(alias)
    ties: dict[str, str] = {}
    untied: dict[str, str] = {}
    stored: list[str] = []
    notes: list[str] = []
    dropped: list[NameGroup] = []
    for canonical, aliases in aliases_of.items():
        present = [name for name in (canonical, *aliases) if name in by_target]
        if not present:
            continue
        stored.extend(present)
        keeper = by_target[present[0]]
        for alias in aliases:
            if alias not in present or alias == present[0] or _equal(by_target[alias], keeper, same_bytes):
                ties[alias] = canonical
            else:
                untied[alias] = canonical
                notes.append(f"{alias} and {canonical} are tied by the config but differ: both are kept, untied")
        dropped += [by_target[name] for name in present[1:] if name in ties]
        if present[0] != canonical:
            groups = [_retarget(g, present[0], canonical) if g is keeper else g for g in groups]
    groups = [g for g in groups if not any(g is d for d in dropped)]
    return groups, ties, tuple(stored), untied, notes


def _equal(a: NameGroup, b: NameGroup, same_bytes: SameBytes) -> bool:
    is_one_each = all(len(group.sources) == 1 and group.label in ("copy", "cut") for group in (a, b))
    return is_one_each and a.label == b.label and same_bytes(a.sources[0], b.sources[0])


def _retarget(group: NameGroup, old: str, new: str) -> NameGroup:
    """The group with one target renamed (the source stored a tie under its alias)."""
    targets = {new if name == old else name: shape for name, shape in group.targets.items()}
    inner = group.transform
    if inner is None:
        return NameGroup(group.sources, targets, cast=group.cast)

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {new if name == old else name: tensor for name, tensor in inner(tensors).items()}

    return NameGroup(group.sources, targets, transform, group.label, group.cast)


def _check_complete(live: Iterable[str], groups: list[NameGroup], ties: Mapping[str, str]) -> None:
    produced = {name for group in groups for name in group.targets} | set(ties)
    missing = set(live) - produced
    if missing:
        raise MismatchError(
            f"the weights lack {name_some(missing)}",
            hint="import-hf --engine transformers has transformers initialise what a Hub model lacks",
        )


def _is_there(target: str, members: list[tuple[str, str]], live: Mapping[str, TensorEntry]) -> bool:
    """Is a Hub tensor one of a part's? Raises MismatchError when only some of what it is made of are there."""
    absent = [name for name, _ in members if name not in live]
    if absent and len(absent) < len(members):
        raise MismatchError(
            f"{target} is made of {name_some([name for name, _ in members if name in live], 2)} and of others that "
            "the import left out",
            hint="export without these (--exclude), or import their whole layer",
        )
    return not absent


def _check_live_names(model: transformers.PreTrainedModel, live: Mapping[str, TensorEntry], is_part: bool) -> None:
    meta = model.state_dict()
    tied = dict(model.all_tied_weights_keys)
    absent = {n for n in meta if n not in live and tied.get(n) not in live and n not in tied.values()}
    if absent and not is_part:
        raise MismatchError(f"the checkpoint lacks tensors of {type(model).__name__}: {name_some(absent)}")
    if unknown := set(live) - set(meta):
        raise MismatchError(f"{type(model).__name__} has no place for {name_some(unknown)}")
    for name, entry in live.items():
        if tuple(meta[name].shape) != entry.shape:
            raise MismatchError(
                f"{name}: config.json wants shape {list(meta[name].shape)}, the checkpoint has {list(entry.shape)}"
            )


def recorded_transforms(model: transformers.PreTrainedModel, provenance: Provenance | None) -> list[Any]:
    if provenance is None or provenance.naming is None or provenance.naming.name != NAMING:
        # What save_pretrained does for a model that from_pretrained did not make.
        known = get_model_conversion_mapping(model, add_legacy=False)
        return [t for t in known if not isinstance(t, PrefixChange)]
    known = get_model_conversion_mapping(model)
    recorded = set(provenance.naming.transforms)
    absent = recorded - {describe(t) for t in known}
    if absent:
        raise MismatchError(
            f"transformers {transformers.__version__} no longer has a name transform that the import used: "
            f"{name_some(absent, 1)}",
            hint=f"pip install transformers=={provenance.naming.library_version}",
        )
    return [t for t in known if describe(t) in recorded]


def _apply_renamings(name: str, renamings: Sequence[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _apply_converters(name: str, converters: list[WeightConverter]) -> tuple[str, str | None]:
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None
