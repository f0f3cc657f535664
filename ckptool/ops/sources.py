"""Opening whatever the user names - a DCP checkpoint or a Hugging Face folder - under one set of names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import stream_tensor
from ckptool.core.interfaces import Source
from ckptool.core.parts import PlanItem
from ckptool.errors import NotFoundError
from ckptool.formats.dcp_metadata import MODEL_PREFIX, is_checkpoint
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.hf_folder import INDEX_NAME
from ckptool.ops.inputs import open_input
from ckptool.planner import plan_conversion
from ckptool.runs import default_root, resolve

#: Pieces in which transformed groups are planned; reads may ask for any box.
_PIECE_BYTES = 32 << 20


def open_any(name: str, root: Path | None = None) -> Source:
    """Open a checkpoint by path or name, or a Hugging Face folder or safetensors file.

    Both serve tensors under `model.<live parameter name>`, so that they can be compared. Raises NotFoundError.
    """
    hub_form = find_hf(name, root)
    if hub_form is not None:
        return LiveSource(hub_form)
    path = Path(name).expanduser()
    if path.is_file():
        raise NotFoundError(f"{path} is neither a checkpoint folder nor a safetensors file")
    return DcpSource(resolve(path, root))


def find_hf(name: str, root: Path | None = None) -> Path | None:
    """The Hugging Face folder or safetensors file that `name` means, as a path or below the root; else None."""
    for place in (Path(name).expanduser(), (default_root() if root is None else root) / name):
        if place.is_file() and place.suffix == ".safetensors":
            return place
        if place.is_dir() and not is_checkpoint(place) and _has_safetensors(place):
            return place
    return None


def _has_safetensors(folder: Path) -> bool:
    return (folder / INDEX_NAME).exists() or any(folder.glob("*.safetensors"))


class LiveSource:
    """A Hugging Face folder that serves its tensors under their live names, converted group by group where needed."""

    def __init__(self, path: Path) -> None:
        model = open_input(path, None)
        self._inner, names = model.source, model.names
        plan = plan_conversion(
            "read",
            self._inner.manifest,
            names,
            str(path),
            cut=stream_tensor,
            piece_bytes=_PIECE_BYTES,
            target_prefix=MODEL_PREFIX,
        )
        self._items: dict[str, PlanItem] = {entry.fqn: item for item in plan.items for entry in item.targets}
        self._converted: tuple[PlanItem, dict[str, Any]] | None = None
        tensors = {entry.fqn: entry for item in plan.items for entry in item.targets}
        ties = {MODEL_PREFIX + alias: MODEL_PREFIX + canonical for alias, canonical in names.ties.items()}
        for alias, canonical in ties.items():
            tensors[alias] = dataclasses.replace(tensors[canonical], fqn=alias)
            self._items[alias] = self._items[canonical]
        self._canonical = ties
        self.notes = (*model.notes, *plan.notes)
        self.manifest = Manifest(str(path), tensors, ties=ties, files=self._inner.manifest.files)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        item = self._items[fqn]
        if item.transform is None:
            self._inner.read_into(item.sources[0], box, out)
            return
        import torch

        tensor = self._convert(item)[self._canonical.get(fqn, fqn)]
        part = tensor[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))].contiguous()
        if part.numel():
            torch.frombuffer(out, dtype=torch.uint8).copy_(part.view(-1).view(torch.uint8))

    def read_object(self, fqn: str) -> bytes:
        return self._inner.read_object(fqn)

    def close(self) -> None:
        self._inner.close()

    def _convert(self, item: PlanItem) -> dict[str, Any]:
        """The tensors of a transformed group; the last group is kept, since its boxes are read one after another."""
        from ckptool.engine import read_whole

        if self._converted is None or self._converted[0] is not item:
            self._converted = None
            tensors = {fqn: read_whole(self._inner, fqn, item.targets[0].dtype) for fqn in item.sources}
            self._converted = (item, dict(item.transform(tensors) if item.transform else tensors))
        return self._converted[1]
