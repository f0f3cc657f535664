"""A Source some of whose tensors are made of others, rows at a time, when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.interfaces import Source, StoreRange
from ckptool.core.recipes import Found
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError, MismatchError

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_BYTES = 64 << 20


class RecipeSource:
    """`source` with the tensors of `found.recipes`, which are of `dtype`, in place of what they are made of."""

    def __init__(self, source: Source, found: Found, dtype: str) -> None:
        self._source = source
        self._recipes = found.recipes
        self._kept: tuple[str, Tensor] | None = None
        used = {name for recipe in found.recipes.values() for name in recipe.sources} | set(found.dropped)
        tensors = {name: entry for name, entry in source.manifest.tensors.items() if name not in used}
        for name, recipe in found.recipes.items():
            tensors[name] = TensorEntry(name, dtype, recipe.shape, (Chunk(Box.whole(recipe.shape)),))
        self.manifest = dataclasses.replace(source.manifest, tensors=tensors, whole_rows=True)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` with rows of a tensor. Raises MismatchError for one that its dtype can't hold."""
        recipe = self._recipes.get(fqn)
        if recipe is None:
            self._source.read_into(fqn, box, out)
            return
        entry = self.manifest.tensors[fqn]
        if box.sizes[1:] != entry.shape[1:]:
            raise DamagedError(f"{self.manifest.location}: {fqn} can only be read in whole rows")
        if not out:
            return
        import torch

        made = torch.frombuffer(out, dtype=getattr(torch, entry.dtype)).view(box.sizes)
        recipe.fill(self._read, box, made)
        if entry.dtype == "float16" and bool(made.isinf().any()):
            raise MismatchError(f"{fqn}: values are too large for float16", hint="--dtype bf16 has the range of fp32")

    def ranges(self, fqn: str, box: Box) -> Iterator[StoreRange]:
        recipe = self._recipes.get(fqn)
        if recipe is None:
            yield from self._source.ranges(fqn, box)
            return
        for name in recipe.sources:
            shape = self._source.manifest.tensors[name].shape
            if shape and shape[0] == recipe.shape[0]:
                yield from self._source.ranges(
                    name, Box((box.offsets[0], *(0 for _ in shape[1:])), (box.sizes[0], *shape[1:]))
                )
            elif box.offsets[0] == 0:  # as a whole, and then kept
                yield from self._source.ranges(name, Box.whole(shape))

    def read_object(self, fqn: str) -> bytes:
        return self._source.read_object(fqn)

    def close(self) -> None:
        self._source.close()

    def _read(self, fqn: str, box: Box) -> Tensor:
        """Part of a stored tensor. A whole one (scales) is kept for the next rows, which need it again."""
        import torch

        entry = self._source.manifest.tensors[fqn]
        kept = self._kept  # one look: other threads read other tensors
        if kept is not None and kept[0] == fqn and box.sizes == entry.shape:
            return kept[1]
        data = bytearray(box.num_elements * entry.itemsize_bytes)
        if not data:
            return torch.empty(box.sizes, dtype=getattr(torch, entry.dtype))
        self._source.read_into(fqn, box, memoryview(data))
        part = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).view(box.sizes)
        if box.sizes == entry.shape and len(data) <= _KEPT_BYTES:
            self._kept = (fqn, part)
        return part
