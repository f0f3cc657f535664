"""Opening whatever the user names - any trainer's DCP checkpoint or a Hugging Face folder - under one set of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import stream_tensor
from ckptool.core.interfaces import Source, StoreRange
from ckptool.core.moves import Moves
from ckptool.core.parts import PlanItem
from ckptool.core.tensors import TensorEntry
from ckptool.errors import CkptoolError, DamagedError, NotFoundError
from ckptool.formats.dcp_metadata import MODEL_PREFIX, checkpoints_inside, is_checkpoint, read_manifest
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.gguf_file import SUFFIX as GGUF_SUFFIX
from ckptool.formats.hf_folder import INDEX_NAME, weight_kind
from ckptool.formats.meta_folder import is_meta_file
from ckptool.naming.dialects import find_dialect
from ckptool.naming.groups import NamePlan, keep_names
from ckptool.naming.sections import Sections, read_sections
from ckptool.ops.inputs import open_input, same_bytes
from ckptool.ops.model_source import ModelSource, find_config
from ckptool.planner import plan_conversion
from ckptool.runs import model_places, resolve
from ckptool.storage.files import Place
from ckptool.storage.place import place

#: Pieces in which transformed groups are planned; reads may ask for any box.
_PIECE_BYTES = 32 << 20


def open_any(name: str | Place, root: Place | None = None, *, model_only: bool = False) -> Source:
    """Open a checkpoint by path or name, or a model in any form that `import-hf` takes, so that they can be compared.

    A Hugging Face folder serves its tensors under `model.<live parameter name>`; with `model_only` so does a checkpoint
    of any trainer. Raises NotFoundError, besides what the naming raises.
    """
    hub_form = _find_model(name, root)
    if hub_form is not None:
        model = open_input(hub_form, None)
        return LiveSource(str(hub_form), model.source, model.names, model.notes)
    path = place(name)
    if path.is_file():
        raise NotFoundError(f"{path} is neither a checkpoint folder nor a safetensors file")
    path = resolve(name, root)
    return _open_model(path) if model_only else DcpSource(path)


def compare_models_only(names: Iterable[str | Place], root: Place | None = None) -> bool:
    """True when not all of these are checkpoints with the same kind of names: their models alone can be compared."""
    kinds = {_kind(name, root) for name in names}
    return "hub" in kinds or len(kinds) > 1


def _kind(name: str | Place, root: Place | None) -> str:
    if _find_model(name, root) is not None:
        return "hub"
    try:
        sections = read_sections(read_manifest(resolve(name, root)))
    except CkptoolError:
        return "live"  # opening it says what is wrong
    return "live" if _is_live(sections) else "other"


def _is_live(sections: Sections) -> bool:
    """True for the names of our own checkpoints; one without a model has no others to offer."""
    is_plain = all(MODEL_PREFIX + name == fqn for name, fqn in sections.model.items())
    return is_plain and find_dialect(sections.model) is None


def _open_model(path: Place) -> Source:
    manifest = read_manifest(path)
    if manifest.provenance is not None and _is_live(read_sections(manifest)):
        return DcpSource(path)
    from ckptool.naming.live_names import plan_live
    from ckptool.naming.meta_model import build_meta_model, read_config

    source = ModelSource(path)
    entries = {fqn.removeprefix(MODEL_PREFIX): entry for fqn, entry in source.manifest.tensors.items()}
    folder = find_config(path, "")
    if read_config(folder.path, len(entries), source.manifest.num_bytes) is None:
        if dialect := find_dialect(entries):
            raise NotFoundError(
                f"{path} has the names of {dialect.name}, and no config.json says which model it is",
                hint=f"put the model's config.json into {folder.path}",
            )
        names = keep_names({name: entry.shape for name, entry in entries.items()}, None, "")
    else:
        model = build_meta_model(folder.path)
        names = plan_live(model, entries, lambda a, b: same_bytes(source, MODEL_PREFIX + a, MODEL_PREFIX + b))
    return LiveSource(str(path), source, names, (*source.notes, *folder.notes), source_prefix=MODEL_PREFIX)


def find_hf(name: str | Place, root: Place | None = None) -> Place | None:
    """The Hugging Face folder or safetensors file that `name` means, as a path or below the root; else None."""
    for path in model_places(name, root):
        if path.is_file() and path.suffix == ".safetensors":
            return path
        if path.is_dir() and not is_checkpoint(path) and _has_safetensors(path):
            return path
    return None


def _find_model(name: str | Place, root: Place | None) -> Place | None:
    """As `find_hf`, and the older forms of a model: `pytorch_model*.bin`, GGUF, Meta's."""
    found = find_hf(name, root)
    return found or next((path for path in model_places(name, root) if _is_model(path)), None)


def _is_model(path: Place) -> bool:
    if not path.is_dir():
        return path.is_file() and path.suffix == GGUF_SUFFIX
    names = [file.name for file in path.iterdir()]
    has_weights = weight_kind(names) is not None or any(
        name.endswith(GGUF_SUFFIX) or is_meta_file(name) for name in names
    )
    return has_weights and not is_checkpoint(path) and not checkpoints_inside(path)


def _has_safetensors(folder: Place) -> bool:
    return (folder / INDEX_NAME).exists() or any(folder.glob("*.safetensors"))


class LiveSource:
    """Another source's tensors under their live names, converted group by group where needed."""

    def __init__(
        self, location: str, inner: Source, names: NamePlan, notes: Iterable[str], source_prefix: str = ""
    ) -> None:
        self._inner = inner
        plan = plan_conversion(
            "read",
            self._inner.manifest,
            names,
            location,
            cut=stream_tensor,
            piece_bytes=_PIECE_BYTES,
            source_prefix=source_prefix,
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
        self.notes = (*notes, *plan.notes)
        self.manifest = Manifest(location, tensors, ties=ties, files=self._inner.manifest.files)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        item = self._items[fqn]
        if item.moves is not None:
            self._read_moved(item.moves, self.manifest.tensors[fqn], box, out)
            return
        if item.transform is None:
            self._inner.read_into(item.sources[0], box, out)
            return
        import torch

        tensor = self._convert(item)[self._canonical.get(fqn, fqn)]
        part = tensor[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))].contiguous()
        if part.numel():
            torch.frombuffer(out, dtype=torch.uint8).copy_(part.view(-1).view(torch.uint8))

    def ranges(self, fqn: str, box: Box) -> Iterable[StoreRange]:
        item = self._items[fqn]
        if item.transform is not None:
            return ()
        if item.moves is None:
            return self._inner.ranges(item.sources[0], box)
        parts = item.moves.pieces(box, lambda part: [part])
        return (wanted for _, source, part in parts for wanted in self._inner.ranges(source, part))

    def read_object(self, fqn: str) -> bytes:
        return self._inner.read_object(fqn)

    def close(self) -> None:
        self._inner.close()

    def _read_moved(self, moves: Moves, entry: TensorEntry, box: Box, out: memoryview) -> None:
        if not box.is_contiguous_in(entry.shape):
            raise DamagedError(f"{self.manifest.location}: {entry.fqn} can only be read in runs of rows")
        start = 0
        for _, source, part in moves.pieces(box, lambda part: [part]):
            end = start + part.num_elements * entry.itemsize_bytes
            self._inner.read_into(source, part, out[start:end])
            start = end

    def _convert(self, item: PlanItem) -> dict[str, Any]:
        """The tensors of a transformed group; the last group is kept, since its boxes are read one after another."""
        from ckptool.engine import read_whole

        if self._converted is None or self._converted[0] is not item:
            self._converted = None
            tensors = {fqn: read_whole(self._inner, fqn, item.targets[0].dtype) for fqn in item.sources}
            self._converted = (item, dict(item.transform(tensors) if item.transform else tensors))
        return self._converted[1]
