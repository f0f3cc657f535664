"""Two NamePlans, one after the other, as one: from a trainer's names to live ones and on to the Hub's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UnsupportedError, name_some
from ckptool.naming.groups import NameGroup, NamePlan


def made_entries(names: NamePlan, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """What a plan makes of `entries`, as tensors that are stored nowhere."""
    return {
        name: TensorEntry(name, entries[group.sources[0]].dtype, shape, ())
        for group in names.groups
        for name, shape in group.targets.items()
    }


def compose(first: NamePlan, second: NamePlan) -> NamePlan:
    """`second` applied to what `first` makes. Groups are joined only where they share tensors, so that each still
    converts alone. `second`'s sources must all be targets of `first`. Casts are `second`'s.

    Raises MismatchError for what `first` makes and `second` leaves, UnsupportedError when tensors that are made
    together would be cast to different dtypes.
    """
    maker = {name: i for i, group in enumerate(first.groups) for name in group.targets}
    leader = list(range(len(first.groups)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for group in second.groups:
        for name in group.sources[1:]:
            leader[find(maker[name])] = find(maker[group.sources[0]])
    users: dict[int, list[NameGroup]] = {}
    for group in second.groups:
        users.setdefault(find(maker[group.sources[0]]), []).append(group)
    makers: dict[int, list[NameGroup]] = {}
    for i, group in enumerate(first.groups):
        makers.setdefault(find(i), []).append(group)
    if unused := [name for i in makers if i not in users for group in makers[i] for name in group.targets]:
        raise MismatchError(f"nothing is made of {name_some(unused)}")
    groups = tuple(_joined(makers[i], users[i]) for i in users)
    return replace(
        second,
        groups=groups,
        ties=first.ties,
        untied=first.untied,
        notes=(*first.notes, *second.notes),
        padded={**first.padded, **second.padded},
    )


def _joined(makers: list[NameGroup], users: list[NameGroup]) -> NameGroup:
    sources = tuple(name for group in makers for name in group.sources)
    targets = {name: shape for group in users for name, shape in group.targets.items()}
    casts = {group.cast for group in users}
    if len(casts) != 1:
        raise UnsupportedError(f"{name_some(list(targets))} are made together, but would be cast to different dtypes")
    (cast,) = casts
    if all(group.transform is None for group in (*makers, *users)) and len(makers) == len(users) == 1:
        return NameGroup(sources, targets, cast=cast)

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return _run(users, _run(makers, tensors))

    labels = dict.fromkeys(group.label for group in (*makers, *users) if group.transform is not None)
    return NameGroup(sources, targets, transform, ", ".join(labels), cast)


def _run(groups: list[NameGroup], tensors: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for group in groups:
        if group.transform is None:
            (source,), (target,) = group.sources, group.targets
            made[target] = tensors[source]
        else:
            made.update(group.transform({name: tensors[name] for name in group.sources}))
    return made
