"""Which adapter a checkpoint holds, with its numbers, and the weights that it belongs to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ckptool.core.box import Box
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError, UsageError, name_some
from ckptool.formats.dcp_metadata import MODEL_PREFIX
from ckptool.naming.adapter_names import LowRank, find_adapter, is_matrix
from ckptool.ops.model_source import ModelSource, find_config
from ckptool.runs import resolve
from ckptool.storage.digests_file import DIGESTS_FILE
from ckptool.storage.files import Place, read_json


@dataclass(frozen=True)
class Adapter:
    """The matrices by module name; the product of each is scaled by alpha / its rank. `record` is what the trainer
    said of it in ckptool.json."""

    layers: dict[str, LowRank]
    alpha: float
    record: dict[str, Any]


def read_adapter(source: ModelSource, alpha: float | None) -> Adapter:
    """Raises UsageError when nobody says the alpha, MismatchError when two do, besides what `find_adapter` raises."""
    entries = {fqn.removeprefix(MODEL_PREFIX): entry for fqn, entry in source.manifest.tensors.items()}
    layers = find_adapter(entries)
    provenance = source.manifest.provenance
    record = dict(provenance.adapter) if provenance else {}
    stated = record.get("alpha")
    if stated is not None and alpha is not None and float(stated) != alpha:
        raise MismatchError(f"--lora-alpha {alpha:g}, and the checkpoint says {stated:g}")
    number = alpha if stated is None else float(stated)
    if number is None:
        raise UsageError("nothing in the checkpoint says the adapter's alpha", hint="--lora-alpha, as it was trained")
    return Adapter(layers, number, record)


def refuse_adapter(source: ModelSource) -> None:
    """Raise UsageError for a checkpoint that holds an adapter and no model."""
    names = [fqn.removeprefix(MODEL_PREFIX) for fqn in source.manifest.tensors]
    if any(is_matrix(name) for name in names) and all(is_matrix(name) for name in names):
        raise UsageError(
            f"{source.manifest.location} holds an adapter, no whole model",
            hint="--adapter writes it for peft, --merge-adapter a model that has it in its weights",
        )


def find_base(path: Place, adapter: Adapter, base: str, root: Place | None) -> Place:
    """The checkpoint of the weights that the adapter belongs to: `base`, else the recorded one beside it.

    Raises UsageError when none is named, MismatchError when its weights are not those that were trained on.
    """
    name = base or adapter.record.get("base")
    if not name:
        raise UsageError("nothing in the checkpoint says which weights the adapter belongs to", hint="--base NAME")
    found = resolve(name, root if base else path.parent)
    wanted = adapter.record.get("base_digest")
    if wanted and wanted != _digest_of_weights(found):
        raise MismatchError(f"{found} is not what the adapter was trained on: its weights are others", hint="--base")
    return found


def _digest_of_weights(path: Place) -> str:
    """As the trainer records it: SHA-256 over the digests of the model's tensors."""
    if not (path / DIGESTS_FILE).exists():
        return ""
    weights = {k: v for k, v in read_json(path / DIGESTS_FILE)["tensors"].items() if k.startswith(MODEL_PREFIX)}
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


class MergedSource(ModelSource):
    """The base's tensors with an adapter's products added, computed in float32 for each box that is read.

    Raises MismatchError when layers don't fit, UnsupportedError when one is not a linear layer (another kind of layer
    stores its weight the other way round).
    """

    def __init__(self, base: Place, adapter: Adapter, matrices: ModelSource, config: str) -> None:
        super().__init__(base)
        self._matrices = matrices
        self._adapter = adapter
        self._check_layers(base, config)
        self._layers = {f"{MODEL_PREFIX}{module}.weight": low_rank for module, low_rank in adapter.layers.items()}
        self.notes = (*self.notes, f"merged: an adapter of {len(self._layers)} layers, alpha {adapter.alpha:g}")

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        super().read_into(fqn, box, out)
        low_rank = self._layers.get(fqn)
        if low_rank is None or not box.num_elements:
            return
        import torch

        (row, column), (num_rows, num_columns) = box.offsets, box.sizes
        b = self._matrix(low_rank.b, Box((row, 0), (num_rows, low_rank.rank)))
        a = self._matrix(low_rank.a, Box((0, column), (low_rank.rank, num_columns)))
        weight = torch.frombuffer(out, dtype=getattr(torch, self.manifest.tensors[fqn].dtype)).view(box.sizes)
        weight.copy_(weight.float() + (b @ a) * (self._adapter.alpha / low_rank.rank))

    def _matrix(self, name: str, box: Box) -> Any:
        import torch

        entry = self._matrices.manifest.tensors[MODEL_PREFIX + name]
        buffer = bytearray(box.num_elements * entry.itemsize_bytes)
        self._matrices.read_into(MODEL_PREFIX + name, box, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=getattr(torch, entry.dtype)).view(box.sizes).float()

    def _check_layers(self, base: Place, config: str) -> None:
        import torch

        from ckptool.naming.meta_model import build_meta_model, read_config

        tensors = self.manifest.tensors
        folder = find_config(base, config).path
        if read_config(folder, len(tensors), self.manifest.num_bytes) is None:
            raise NotFoundError(f"{base} has no config.json, without which its layers aren't known", hint="--config")
        kinds = dict(build_meta_model(folder).named_modules())
        for module, low_rank in self._adapter.layers.items():
            entry = tensors.get(f"{MODEL_PREFIX}{module}.weight")
            if entry is None or module not in kinds:
                raise MismatchError(f"{base} has no layer {name_some([module])}, which the adapter belongs to")
            if not isinstance(kinds[module], torch.nn.Linear):
                raise UnsupportedError(f"{module} is a {type(kinds[module]).__name__}, not a linear layer")
            a, b = (self._matrices.manifest.tensors[MODEL_PREFIX + name].shape for name in (low_rank.a, low_rank.b))
            if entry.shape != (b[0], a[1]):
                raise MismatchError(f"{module} is {list(entry.shape)}, and its adapter {[b[0], a[1]]}")
