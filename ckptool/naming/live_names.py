"""From the names in a trainer's checkpoint to transformers' live names: as they are, as another library has them, or as
the Hub does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from ckptool.core.provenance import Naming
from ckptool.core.tensors import TensorEntry
from ckptool.errors import name_some
from ckptool.naming.dialects import find_dialect
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.naming.name_table import groups_to_live
from ckptool.naming.sections import common_prefix
from ckptool.naming.transformers_names import NAMING, SameBytes, plan_import, settle_import


def plan_live(
    model: transformers.PreTrainedModel, entries: Mapping[str, TensorEntry], same_bytes: SameBytes
) -> NamePlan:
    """Groups that make every live tensor of `model` (on meta) from a trainer's tensors, whose names are found out.

    `same_bytes(a, b)` compares two of them; asked only where a tie is stored twice. Raises MismatchError for names or
    shapes that don't fit the model, either way.
    """
    dialect = find_dialect(entries)
    if dialect is not None:
        groups, notes = groups_to_live(dialect, entries, model.config)
        naming = Naming(dialect.name, type(model).__name__, (), transformers.__version__)
        names = settle_import(model, groups, naming, [], same_bytes, may_be_padded=True)
        return replace(names, notes=(*notes, *names.notes))
    meta = model.state_dict()
    prefix = common_prefix(entries, meta)
    plain = {name.removeprefix(prefix): entry for name, entry in entries.items()}
    if set(plain) <= set(meta):
        groups = [NameGroup((name,), {name: entry.shape}) for name, entry in plain.items()]
        naming = Naming(NAMING, type(model).__name__, (), transformers.__version__)
        names = settle_import(
            model, groups, naming, [], lambda a, b: same_bytes(prefix + a, prefix + b), may_be_padded=True
        )
    else:
        names = plan_import(model, plain, None, lambda a, b: same_bytes(prefix + a, prefix + b), may_be_padded=True)
    if names.extra:
        note = f"left out, the model doesn't use them: {name_some(list(names.extra))}"
        names = replace(names, extra=(), notes=(note, *names.notes))
    return _with_prefix(names, prefix) if prefix else names


def _with_prefix(names: NamePlan, prefix: str) -> NamePlan:
    groups = tuple(_prefixed(group, prefix) for group in names.groups)
    note = f"every name in the checkpoint begins with {prefix!r}, which is taken off"
    return replace(names, groups=groups, notes=(note, *names.notes))


def _prefixed(group: NameGroup, prefix: str) -> NameGroup:
    sources = tuple(prefix + name for name in group.sources)
    inner = group.transform
    if inner is None:
        return replace(group, sources=sources)

    def transform(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return dict(inner({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}))

    return replace(group, sources=sources, transform=transform)
