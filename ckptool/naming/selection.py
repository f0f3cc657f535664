"""Parts of a NamePlan, and ties taken apart: what the options --keys, --exclude and --untie do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptool.errors import MismatchError, NotFoundError, name_some
from ckptool.naming.groups import NameGroup, NamePlan


def untie_all(names: NamePlan) -> NamePlan:
    """The plan with every tied name as a tensor of its own, made of the one that is read for both."""
    aliases: dict[str, list[str]] = {}
    for alias, canonical in names.ties.items():
        aliases.setdefault(canonical, []).append(alias)
    groups = tuple(
        _with_copies(group, {name: aliases[name] for name in group.targets if name in aliases})
        for group in names.groups
    )
    note = f"untied: {name_some(list(names.ties))}"
    notes = (*names.notes, *([note] if names.ties else []))
    return replace(names, groups=groups, ties={}, untied={**names.untied, **names.ties}, notes=notes)


def _with_copies(group: NameGroup, copies: Mapping[str, list[str]]) -> NameGroup:
    """The group with some targets under further names too."""
    if not copies:
        return group
    targets = {**group.targets, **{copy: group.targets[n] for n, more in copies.items() for copy in more}}

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        if group.transform is None:
            made = {name: tensors[source] for name, source in zip(group.targets, group.sources, strict=True)}
        else:
            made = dict(group.transform(tensors))
        return {**made, **{copy: made[name] for name, more in copies.items() for copy in more}}

    return replace(group, targets=targets, transform=transform, label=f"{group.label}, untie")


def select_targets(names: NamePlan, is_chosen: Callable[[str], bool]) -> NamePlan:
    """The part of a plan that makes the chosen targets. Raises NotFoundError when there are none."""
    groups = tuple(kept for group in names.groups if (kept := _part(group, is_chosen)) is not None)
    if not groups:
        raise NotFoundError(
            "--keys and --exclude leave nothing", hint="ckptool inspect shows the names of a checkpoint"
        )
    made = {name for group in groups for name in group.targets}
    num_left_out = sum(len(group.targets) for group in names.groups) - len(made)
    ties = {alias: canonical for alias, canonical in names.ties.items() if canonical in made}
    return replace(names, groups=groups, ties=ties, notes=(*names.notes, *_left_out(num_left_out)))


def select_sources(names: NamePlan, is_chosen: Callable[[str], bool]) -> NamePlan:
    """The part of a plan that reads the chosen sources. Raises NotFoundError when there are none, MismatchError when a
    target is made of chosen and other ones."""
    groups = []
    for group in names.groups:
        chosen = [name for name in group.sources if is_chosen(name)]
        if 0 < len(chosen) < len(group.sources):
            raise MismatchError(
                f"{name_some(list(group.targets))} is made of {name_some(chosen, 2)} and of others that "
                "--keys and --exclude leave out"
            )
        if chosen:
            groups.append(group)
    if not groups:
        raise NotFoundError(
            "--keys and --exclude leave nothing", hint="ckptool inspect shows the names of a checkpoint"
        )
    return replace(names, groups=tuple(groups), notes=(*names.notes, *_left_out(len(names.groups) - len(groups))))


def _left_out(number: int) -> list[str]:
    return [f"only a part: --keys and --exclude leave out {number} tensors"] if number else []


def _part(group: NameGroup, is_chosen: Callable[[str], bool]) -> NameGroup | None:
    targets = {name: shape for name, shape in group.targets.items() if is_chosen(name)}
    whole = group.transform
    if len(targets) == len(group.targets) or not targets or whole is None:
        return group if targets else None

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in whole(tensors).items() if name in targets}

    return replace(group, targets=targets, transform=transform)


def in_order_of(names: NamePlan, sources: Iterable[str]) -> NamePlan:
    """The plan with its groups in the order in which their first tensors come in `sources`."""
    place = {name: number for number, name in enumerate(sources)}
    groups = sorted(names.groups, key=lambda group: min(place[name] for name in group.sources))
    return replace(names, groups=tuple(groups))
