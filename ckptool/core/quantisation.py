"""How a stored form of weights becomes weights again: recipes that work on any rows, so that nothing is read twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ckptool.core.box import Box

#: (name of a stored tensor, box) -> its elements, as a tensor of torch (which core doesn't import).
ReadPart = Callable[[str, Box], Any]


class Recipe(Protocol):
    """One weight: of `shape`, made of the stored tensors `sources`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    def fill(self, read: ReadPart, box: Box, out: Any) -> None:
        """Put the weight's elements in `box`, whole rows of dim 0, into the tensor `out` of the box's sizes."""
        ...


@dataclass(frozen=True)
class Found:
    """The weights of a quantised model by name, and the tensors that no weight is made of and that are left out."""

    recipes: Mapping[str, Recipe]
    dropped: tuple[str, ...] = ()
