"""Another library's names for a model's tensors, as a table: a row per live tensor, read either way.

The forms say how the values differ. torch is imported where values are touched, so that names alone can be told apart
without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, name_some
from ckptool.naming.groups import NameGroup
from ckptool.naming.rope_rows import halves_apart, neighbours_together

if TYPE_CHECKING:
    import torch


class Form(Protocol):
    """How one live tensor is made of theirs, and theirs of it. `config` is transformers' config of the model."""

    def to_live(self, theirs: Sequence[torch.Tensor], config: Any) -> torch.Tensor: ...

    def from_live(self, live: torch.Tensor, config: Any) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class PairedRows:
    """RoPE turns neighbouring rows of theirs as a pair. `heads` is the config's attribute with the number of heads."""

    heads: str

    def to_live(self, theirs: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
        return halves_apart(theirs[0], getattr(config, self.heads))

    def from_live(self, live: torch.Tensor, config: Any) -> Sequence[torch.Tensor]:
        return [neighbours_together(live, getattr(config, self.heads))]


@dataclass(frozen=True)
class Joined:
    """The live tensor is theirs, of equal size, one after the other along `dim`."""

    dim: int
    num_parts: int = 2

    def to_live(self, theirs: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
        import torch

        return torch.cat(list(theirs), dim=self.dim)

    def from_live(self, live: torch.Tensor, config: Any) -> Sequence[torch.Tensor]:
        return [part.contiguous() for part in live.chunk(self.num_parts, dim=self.dim)]


@dataclass(frozen=True)
class Row:
    """The live tensor `live` and what another library has instead; `{}` is the layer's number in both.

    No form: the values are the same. Several rows may speak of one live tensor, for libraries that have changed their
    names: all are read, the first is written. `zeros` are names of vectors that the library asks for besides, which
    start as zeros, as many as the live tensor has rows; transformers has nothing like them.
    """

    live: str
    theirs: tuple[str, ...]
    form: Form | None = None
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """A library's names. It is known by `marks`: names that are all there, whatever the model.

    `tables` are by the `model_type` of transformers' config. `left_out` are patterns of tensors that transformers'
    models have no place for, each with the reason why an export may lack them.
    `keys` are those below which the library saves its model's tensors; none where they stand bare at the top.
    """

    name: str
    marks: tuple[str, ...]
    tables: Mapping[str, tuple[Row, ...]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def table(self, model_type: str) -> tuple[Row, ...]:
        """Raises MismatchError for a model that it has no table for."""
        if model_type not in self.tables:
            raise MismatchError(
                f"{self.name}'s names are known for {', '.join(self.tables)}, and the config is of {model_type!r}"
            )
        return self.tables[model_type]


@dataclass
class _Found:
    """The names found for one row of one layer."""

    row: Row
    layer: str
    names: dict[int, str] = field(default_factory=dict)


def groups_to_live(
    dialect: Dialect, entries: Mapping[str, TensorEntry], config: Any
) -> tuple[list[NameGroup], list[str]]:
    """Groups that make live tensors from theirs, and notes on what is left out.

    Raises MismatchError for names and shapes that the table lacks.
    """
    rows = dialect.table(config.model_type)
    patterns = [(_pattern(their), row, i) for row in rows for i, their in enumerate(row.theirs)]
    found: dict[tuple[int, str], _Found] = {}
    unknown = []
    left_out: dict[str, list[str]] = {}
    for name in entries:
        for pattern, row, i in patterns:
            if match := pattern.fullmatch(name):
                layer = match[1] if match.groups() else ""
                found.setdefault((id(row), layer), _Found(row, layer)).names[i] = name
                break
        else:
            reason = next((why for pattern, why in dialect.left_out.items() if re.search(pattern, name)), "")
            if reason:
                left_out.setdefault(reason, []).append(name)
            else:
                unknown.append(name)
    if unknown:
        raise MismatchError(f"{dialect.name}'s {config.model_type} has no tensor {name_some(unknown)}")
    notes = [f"left out, {reason}: {name_some(names)}" for reason, names in left_out.items()]
    return [_to_live(item, entries, config) for item in found.values()], notes


def groups_from_live(dialect: Dialect, entries: Mapping[str, TensorEntry], config: Any) -> list[NameGroup]:
    """Groups that make their tensors from live ones. Raises MismatchError for names that the table lacks."""
    patterns = [(_pattern(row.live), row) for row in dialect.table(config.model_type)]
    groups = []
    unknown = []
    for name, entry in entries.items():
        row, layer = next(
            ((r, m[1] if m.groups() else "") for p, r in patterns if (m := p.fullmatch(name))), (None, "")
        )
        if row is None:
            unknown.append(name)
        else:
            groups.append(_from_live(row, layer, entry, config))
    if unknown:
        raise MismatchError(f"{dialect.name}'s {config.model_type} has no tensor for {name_some(unknown)}")
    return groups


def _to_live(found: _Found, entries: Mapping[str, TensorEntry], config: Any) -> NameGroup:
    row, live = found.row, found.row.live.format(found.layer)
    absent = [their.format(found.layer) for i, their in enumerate(row.theirs) if i not in found.names]
    if absent:
        raise MismatchError(f"the checkpoint lacks {name_some(absent)}, which {live} is made of")
    names = tuple(found.names[i] for i in range(len(row.theirs)))
    form = row.form
    if form is None:
        return NameGroup(names, {live: entries[names[0]].shape})

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {live: form.to_live([tensors[name] for name in names], config)}

    return _with_shapes(names, entries, transform, type(form).__name__)


def _from_live(row: Row, layer: str, entry: TensorEntry, config: Any) -> NameGroup:
    theirs, zeros = ([name.format(layer) for name in names] for names in (row.theirs, row.zeros))
    form, name = row.form, row.live.format(layer)
    if form is None and not zeros:
        return NameGroup((name,), {theirs[0]: entry.shape})

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        live = tensors[name]
        made = [live] if form is None else form.from_live(live, config)
        return dict(zip(theirs, made, strict=True)) | {zero: live.new_zeros(live.shape[0]) for zero in zeros}

    return _with_shapes((name,), {name: entry}, transform, type(form).__name__ if form else "Copy")


def _with_shapes(names: tuple[str, ...], entries: Mapping[str, TensorEntry], transform: Any, label: str) -> NameGroup:
    """The group, its targets' shapes found out on meta tensors."""
    import torch

    try:
        made = transform({name: torch.empty(entries[name].shape, device="meta") for name in names})
    except (ValueError, RuntimeError, IndexError) as error:
        raise MismatchError(f"{name_some(list(names))} don't fit the config: {error}") from error
    return NameGroup(names, {name: tuple(t.shape) for name, t in made.items()}, transform, label)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
