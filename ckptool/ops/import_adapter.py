"""A LoRA adapter that peft has saved, imported beside the base that it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.interfaces import Source, StoreRange
from ckptool.errors import MismatchError, NotFoundError, UsageError, name_some
from ckptool.formats.adapter_config import CONFIG_NAME, WEIGHTS_NAME, AdapterConfig
from ckptool.formats.hf_config import CONFIG_NAME as MODEL_CONFIG_NAME
from ckptool.formats.hf_folder import HfSource, model_folder, side_files
from ckptool.hub import locate
from ckptool.naming.adapter_names import find_adapter, matrix_names
from ckptool.naming.groups import NameGroup
from ckptool.ops.adapters import check_layers, layer_shapes, transposed_layers
from ckptool.ops.inputs import ModelInput
from ckptool.storage.files import Place, read_json
from ckptool.storage.place import file_version

_OLDER_WEIGHTS_NAME = "adapter_model.bin"


class JoinedSource:
    """Two Sources as one; they share no name."""

    def __init__(self, first: Source, second: Source) -> None:
        self._first, self._second = first, second
        tensors = {**first.manifest.tensors, **second.manifest.tensors}
        self.manifest = dataclasses.replace(first.manifest, tensors=tensors)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        of = self._second if fqn in self._second.manifest.tensors else self._first
        of.read_into(fqn, box, out)

    def ranges(self, fqn: str, box: Box) -> Iterable[StoreRange]:
        of = self._second if fqn in self._second.manifest.tensors else self._first
        return of.ranges(fqn, box)

    def read_object(self, fqn: str) -> bytes:
        return self._first.read_object(fqn)

    def close(self) -> None:
        self._first.close()
        self._second.close()


def add_adapter(model: ModelInput, adapter: str, cast: str | None, folder: Place) -> ModelInput:
    """`model`, which is that of `folder`, with the adapter of the folder or Hub id `adapter` beside its layers.

    Raises NotFoundError when it is no such folder, UnsupportedError for adapters other than LoRA on linear layers,
    MismatchError when it belongs to another model, DamagedError when it contradicts itself.
    """
    path = locate(adapter, None).path
    config = _read_config(path)
    source = HfSource(_weights_file(path))
    entries = source.manifest.tensors
    layers = find_adapter(entries)
    for module, low_rank in layers.items():
        config.scale(module, low_rank.rank)  # refuses another rank than the config's
    live = {name: shape for group in model.names.groups for name, shape in group.targets.items()}
    live |= {alias: live[canonical] for alias, canonical in model.names.ties.items()}
    shapes = layer_shapes(layers, entries)
    where = f"{model.source.manifest.location}, with {adapter},"
    check_layers(shapes, live, where, _transposed(shapes, live, folder))
    clash = entries.keys() & model.source.manifest.tensors.keys()
    if clash:
        raise MismatchError(f"{adapter} and the base both hold {name_some(clash)}")
    groups = [
        NameGroup((name,), {matrix_names(module)[side]: entries[name].shape}, cast=cast)
        for module, low_rank in layers.items()
        for side, name in (("A", low_rank.a), ("B", low_rank.b))
    ]
    names = dataclasses.replace(model.names, groups=(*model.names.groups, *groups))
    return dataclasses.replace(
        model,
        source=JoinedSource(model.source, source),
        names=names,
        notes=(*model.notes, *_notes(path, adapter, len(layers))),
        adapter=_record(config),
        also=(*model.also, *_versions(path)),
    )


def _transposed(
    adapter: Mapping[str, tuple[int, ...]], weights: Mapping[str, tuple[int, ...]], folder: Place
) -> set[str]:
    """The layers whose weights are (inputs, outputs); the model is only asked when there seem to be some."""
    turned = (m for m, shape in adapter.items() if shape != shape[::-1] == weights.get(f"{m}.weight"))
    if next(turned, None) is None or not (folder / MODEL_CONFIG_NAME).is_file():
        return set()
    from ckptool.naming.meta_model import build_meta_model

    return transposed_layers(dict(build_meta_model(model_folder(folder)).named_modules()))


def refuse_adapter_alone(path: Place) -> None:
    """Raise UsageError for a folder of peft's given as the model: its alpha, and what it belongs to, would be lost."""
    if path.is_dir() and (path / CONFIG_NAME).is_file() and not (path / MODEL_CONFIG_NAME).is_file():
        raise UsageError(f"{path} is an adapter, no model", hint=f"ckptool import-hf BASE NAME --adapter {path}")


def _read_config(path: Place) -> AdapterConfig:
    if not (path / CONFIG_NAME).is_file():
        raise NotFoundError(f"--adapter {path}: there is no {CONFIG_NAME}", hint="a folder that peft has saved")
    return AdapterConfig.parse(read_json(path / CONFIG_NAME), str(path / CONFIG_NAME))


def _weights_file(path: Place) -> Place:
    for name in (WEIGHTS_NAME, _OLDER_WEIGHTS_NAME):
        if (path / name).is_file():
            return path / name
    raise NotFoundError(f"--adapter {path}: there is no {WEIGHTS_NAME}", hint="a folder that peft has saved")


def _record(config: AdapterConfig) -> dict[str, Any]:
    """For ckptool.json. There is no `base`: the checkpoint holds it."""
    numbers = {"rank": config.rank, "alpha": config.alpha, "targets": config.targets}
    return {"type": "lora", **numbers, "config": dict(config.record)}


def _notes(path: Place, adapter: str, num_layers: int) -> list[str]:
    notes = [f"with the adapter {adapter}, beside {num_layers} layers"]
    if others := [name for name in side_files(path) if name != CONFIG_NAME]:
        notes.append(f"left in the adapter's folder: {name_some(others)}")
    return notes


def _versions(path: Place) -> list[str]:
    files = [path / CONFIG_NAME, _weights_file(path)]
    return [f"{file} {file_version(file)}" for file in files]
