"""Which adapter a checkpoint holds, with its numbers, and the weights that it belongs to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError, UsageError, name_some
from ckptool.formats.adapter_config import AdapterConfig
from ckptool.formats.casts import check_overflow
from ckptool.formats.dcp_metadata import MODEL_PREFIX
from ckptool.naming.adapter_names import LowRank, base_name, find_adapter, is_matrix
from ckptool.ops.model_source import ModelSource, find_config
from ckptool.runs import resolve
from ckptool.storage.digests_file import weights_digest
from ckptool.storage.files import Place
from ckptool.storage.place import file_version, place


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The matrices by module name, what the product of each is multiplied by, and the config that says so to peft.

    `record` is what ckptool.json says of it.
    """

    layers: dict[str, LowRank]
    scales: dict[str, float]
    config: AdapterConfig
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
    if "config" in record:
        config = AdapterConfig.parse(record["config"], source.manifest.location)
    else:
        repo = provenance.source.get("repo") if provenance else None
        config = _made_config(layers, number, repo or record.get("base"))
    scales = {module: config.scale(module, low_rank.rank) for module, low_rank in layers.items()}
    return Adapter(layers, scales, config, record)


def _made_config(layers: Mapping[str, LowRank], alpha: float, base: str | None) -> AdapterConfig:
    """What peft is to be told of an adapter whose layers all count alpha / their own rank."""
    ranks = {module: low_rank.rank for module, low_rank in layers.items()}
    ((usual, _),) = Counter(ranks.values()).most_common(1)
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "rank_pattern": others,
        "target_modules": sorted(ranks),
    }
    return AdapterConfig(usual, alpha, others, record=record)


def refuse_adapter(source: ModelSource) -> None:
    """Raise UsageError for a checkpoint that holds an adapter: alone, or beside the model that it belongs to."""
    names = [fqn.removeprefix(MODEL_PREFIX) for fqn in source.manifest.tensors]
    provenance = source.manifest.provenance
    is_alone = all(is_matrix(name) for name in names)
    is_beside = any(".base_layer." in name for name in names) if provenance is None else bool(provenance.adapter)
    if is_alone or (is_beside and any(is_matrix(name) for name in names)):
        what = "an adapter, no whole model" if is_alone else "an adapter beside its model"
        raise UsageError(
            f"{source.manifest.location} holds {what}",
            hint="--adapter writes it for peft, --merge-adapter a model that has it in its weights",
        )


def find_base(path: Place, source: ModelSource, adapter: Adapter, base: str, root: Place | None) -> Place:
    """The checkpoint of the weights that the adapter in `path` belongs to: `base`, else `path` itself when it has them,
    else the recorded one beside it.

    Raises UsageError when none is named, NotFoundError when it isn't there, MismatchError when its weights are not
    those that were trained on.
    """
    name = base or adapter.record.get("base")
    if not base and any(not is_matrix(fqn) for fqn in source.manifest.tensors):
        return path
    if not name:
        raise UsageError("nothing in the checkpoint says which weights the adapter belongs to", hint="--base NAME")
    try:
        found = resolve(name, root if base else path.parent)
    except NotFoundError as error:
        if base:
            raise
        raise NotFoundError(
            f"the adapter in {path} was trained on {name}, which is not beside it", hint="--base NAME says where it is"
        ) from error
    wanted = adapter.record.get("base_digest")
    if wanted and wanted != weights_digest(found):
        raise MismatchError(
            f"{found} is not what the adapter was trained on: its weights are others", hint="--base NAME"
        )
    return found


def check_layers(
    adapter: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, tuple[int, ...]],
    where: str,
    transposed: Collection[str] = (),
) -> None:
    """Raise MismatchError when a layer of an adapter (module -> (outputs, inputs)) is none of `weights`', or another
    size. The weights of modules in `transposed` are (inputs, outputs)."""
    if absent := [module for module in adapter if f"{module}.weight" not in weights]:
        raise MismatchError(f"{where} has no layer {name_some(absent)}, which the adapter belongs to")
    for module, shape in adapter.items():
        found = weights[f"{module}.weight"]
        if (found[::-1] if module in transposed else found) != shape:
            raise MismatchError(f"{module} is {list(found)}, and its adapter {list(shape)}")


def transposed_layers(modules: Mapping[str, Any]) -> set[str]:
    """The names of those of a model's modules whose weights are (inputs, outputs): GPT-2's kind of linear layer."""
    from transformers.pytorch_utils import Conv1D

    return {name for name, module in modules.items() if isinstance(module, Conv1D)}


def layer_shapes(layers: Mapping[str, LowRank], entries: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """The shapes that the layers' weights must have: (outputs, inputs)."""
    return {module: (entries[pair.b].shape[0], entries[pair.a].shape[1]) for module, pair in layers.items()}


class MergedSource(ModelSource):
    """The base's tensors with an adapter's products added, computed in float32 for each box that is read.

    Other matrices in the base's checkpoint are left out: they are where that adapter began. Raises MismatchError when
    layers don't fit, UnsupportedError when one is not a linear layer, or shares its weight.
    """

    def __init__(self, base: Place, adapter: Adapter, matrices: ModelSource, config: str) -> None:
        super().__init__(base)
        self._leave_model()
        self._matrices = matrices
        self._adapter = adapter
        self._transposed = self._check_layers(base, config)
        self._layers = {f"{MODEL_PREFIX}{module}.weight": module for module in adapter.layers}
        self.notes = (*self.notes, f"merged: an adapter of {len(self._layers)} layers, alpha {adapter.config.alpha:g}")

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        super().read_into(fqn, box, out)
        if fqn not in self._layers or not box.num_elements:
            return
        import torch

        module = self._layers[fqn]
        low_rank = self._adapter.layers[module]
        (row, column), (num_rows, num_columns) = box.offsets, box.sizes
        if is_transposed := module in self._transposed:
            row, column, num_rows, num_columns = column, row, num_columns, num_rows
        b = self._matrix(low_rank.b, Box((row, 0), (num_rows, low_rank.rank)))
        a = self._matrix(low_rank.a, Box((0, column), (low_rank.rank, num_columns)))
        product = (b @ a).T if is_transposed else b @ a
        weight = torch.frombuffer(out, dtype=getattr(torch, self.manifest.tensors[fqn].dtype)).view(box.sizes)
        merged = weight.float() + product * self._adapter.scales[module]
        weight.copy_(merged)
        check_overflow(fqn, merged, weight, hint="the sum has the base's dtype: import the base in bf16 or fp32")

    def versions(self) -> tuple[str, ...]:
        """What is added to the base, in words that change with it."""
        manifest = self._matrices.manifest
        files = [place(manifest.location) / file for file in manifest.files]
        return (repr(sorted(self._adapter.scales.items())), *(f"{file} {file_version(file)}" for file in files))

    def _leave_model(self) -> None:
        """Leave nothing but the base's tensors, under the names of the model without an adapter."""
        plain = {
            fqn: MODEL_PREFIX + base_name(fqn.removeprefix(MODEL_PREFIX))
            for fqn in self.manifest.tensors
            if not is_matrix(fqn)
        }
        tensors = {name: dataclasses.replace(self.manifest.tensors[fqn], fqn=name) for fqn, name in plain.items()}
        ties = {plain[alias]: plain[fqn] for alias, fqn in self.manifest.ties.items() if {alias, fqn} <= plain.keys()}
        self.manifest = dataclasses.replace(self.manifest, tensors=tensors, ties=ties)
        self.stored = {name: self.stored[fqn] for fqn, name in plain.items() if fqn in self.stored}

    def _matrix(self, name: str, box: Box) -> Any:
        import torch

        entry = self._matrices.manifest.tensors[MODEL_PREFIX + name]
        buffer = bytearray(box.num_elements * entry.itemsize_bytes)
        self._matrices.read_into(MODEL_PREFIX + name, box, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=getattr(torch, entry.dtype)).view(box.sizes).float()

    def _check_layers(self, base: Place, config: str) -> set[str]:
        """The modules whose weights are (inputs, outputs)."""
        import torch

        from ckptool.naming.meta_model import build_meta_model, read_config

        tensors = {fqn.removeprefix(MODEL_PREFIX): entry for fqn, entry in self.manifest.tensors.items()}
        folder = find_config(base, config).path
        if read_config(folder, len(tensors), self.manifest.num_bytes) is None:
            raise NotFoundError(f"{base} has no config.json, without which its layers aren't known", hint="--config")
        entries = {fqn.removeprefix(MODEL_PREFIX): entry for fqn, entry in self._matrices.manifest.tensors.items()}
        kinds = dict(build_meta_model(folder).named_modules())
        transposed = transposed_layers(kinds)
        for module in self._adapter.layers:
            if module in kinds and module not in transposed and not isinstance(kinds[module], torch.nn.Linear):
                raise UnsupportedError(f"{module} is a {type(kinds[module]).__name__}, not a linear layer")
            if module not in kinds and transposed:  # a weight of as many inputs as outputs doesn't tell
                raise UnsupportedError(
                    f"{module}: nothing says whether its weight is (outputs, inputs) or the other way"
                )
        shapes = {name: entry.shape for name, entry in tensors.items()}
        check_layers(layer_shapes(self._adapter.layers, entries), shapes, str(base), transposed)
        shared = {name.removeprefix(MODEL_PREFIX) for pair in self.manifest.ties.items() for name in pair}
        if tied := [module for module in self._adapter.layers if f"{module}.weight" in shared]:
            raise UnsupportedError(
                f"{name_some(tied)} shares its weight with another layer, and merging would change both",
                hint="--adapter, or a base that was imported with --untie",
            )
        return transposed
