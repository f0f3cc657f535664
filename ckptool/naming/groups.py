"""What a naming gives the planner: which tensors turn into which, in groups that convert on their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptool.core.parts import Transform
from ckptool.core.provenance import Naming


@dataclass(frozen=True)
class NameGroup:
    """`sources` become `targets` (name -> shape). A group without a transform renames one tensor.

    `cast` is the dtype that every castable source is converted to first (None: keep).
    """

    sources: tuple[str, ...]
    targets: Mapping[str, tuple[int, ...]]
    transform: Transform | None = None
    label: str = "copy"
    cast: str | None = None


@dataclass(frozen=True)
class NamePlan:
    """Every name of the source accounted for: in a group, equal to a tie's tensor, or in `extra`.

    `extra` are tensors that the model has no use for (buffers that it computes, heads of another task): they travel
    beside the checkpoint, so that an export gives them back. `padded` are tensors whose rows beyond the vocabulary are
    cut off: name -> (rows stored, rows kept).
    """

    groups: tuple[NameGroup, ...]
    naming: Naming
    ties: Mapping[str, str] = field(default_factory=dict)
    stored_tied_names: tuple[str, ...] = ()
    untied: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def keep_names(shapes: Mapping[str, tuple[int, ...]], cast: str | None, note: str) -> NamePlan:
    """The naming that changes nothing, for tensors whose model isn't known."""
    groups = tuple(NameGroup((name,), {name: shape}, cast=cast) for name, shape in shapes.items())
    return NamePlan(groups, Naming("as-stored"), notes=(note,))
