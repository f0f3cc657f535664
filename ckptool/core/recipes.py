"""Recipes: how tensors are made of what is stored, rows at a time, while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckptool.core.box import Box

#: (name of a stored tensor, box) -> its elements, as a tensor of torch (which core doesn't import).
ReadPart = Callable[[str, Box], Any]


class Recipe(Protocol):
    """One tensor: of `shape`, made of the stored tensors `sources`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    def fill(self, read: ReadPart, box: Box, out: Any) -> None:
        """Put the tensor's elements in `box`, whole rows of dim 0, into the tensor `out` of the box's sizes."""
        ...


@dataclass(frozen=True)
class Found:
    """The tensors to make, by name, and the stored ones that nothing is made of and that are left out."""

    recipes: Mapping[str, Recipe]
    dropped: tuple[str, ...] = ()
