"""The model in a checkpoint of any trainer, as a Source under the model's own names; and the config it goes with."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from pathlib import Path

from ckptool.core.box import Box
from ckptool.core.interfaces import StoreRange
from ckptool.errors import DamagedError, NotFoundError, name_some
from ckptool.formats.dcp_metadata import MODEL_PREFIX
from ckptool.formats.hf_config import CONFIG_NAME
from ckptool.formats.hf_folder import EXTRA_NAME, HfSource, model_folder, side_files, weight_kind
from ckptool.formats.sharded_safetensors import SIDE_FOLDER
from ckptool.hub import locate
from ckptool.naming.sections import MODEL, read_sections
from ckptool.ops.stored import open_stored
from ckptool.storage.files import Place, read_json
from ckptool.storage.place import fetched

#: A model's files beside its weights, by their usual names.
_MODEL_FILES = (
    *("config.json", "generation_config.json", "*tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "spiece.model", "chat_template*", "*processor_config.json"),
)


#: What transformers finds the model's class by.
_CONFIG_KEYS = ("model_type", "architectures", "auto_map")


class ModelSource:
    """A checkpoint's model, its tensors under `model.<the model's own name>` whatever sections the trainer saved.

    The tensors that an import kept aside are among them. `stored` gives the fqn in the checkpoint of each such name.
    Raises NotFoundError when it holds no model, besides what `read_sections` raises.
    """

    def __init__(self, path: Place) -> None:
        self._dcp = open_stored(path)
        manifest = self._dcp.manifest
        self.sections = read_sections(manifest)
        self.stored = {MODEL_PREFIX + name: fqn for name, fqn in self.sections.model.items()}
        if not self.stored:
            raise NotFoundError(f"{path} has no tensors of a model", hint=_what_it_holds(path, self.sections.counts()))
        own = {fqn: name for name, fqn in self.stored.items()}
        tensors = {name: dataclasses.replace(manifest.tensors[fqn], fqn=name) for name, fqn in self.stored.items()}
        ties = {own[alias]: own[fqn] for alias, fqn in manifest.ties.items() if alias in own and fqn in own}
        self._extra: HfSource | None = None
        self.extra: frozenset[str] = frozenset()
        if (path / "hf" / EXTRA_NAME).exists():
            self._extra = HfSource(path / "hf" / EXTRA_NAME)
            kept = self._extra.manifest.tensors
            self.extra = frozenset(kept)
            if clash := {MODEL_PREFIX + name for name in kept} & set(tensors):
                raise DamagedError(f"{path}: tensors both in the checkpoint and kept aside: {name_some(clash)}")
            tensors |= {MODEL_PREFIX + name: entry for name, entry in kept.items()}
        self.manifest = dataclasses.replace(manifest, tensors=tensors, ties=ties)
        self.notes = self._notes()

    @property
    def is_plain(self) -> bool:
        """True when the model's tensors are stored as `model.*`, under the model's own names."""
        return all(name == fqn for name, fqn in self.stored.items())

    def stored_name(self, name: str) -> str:
        """The fqn in the checkpoint of what the model calls `name`."""
        return self.stored.get(MODEL_PREFIX + name, MODEL_PREFIX + name)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        name = fqn.removeprefix(MODEL_PREFIX)
        if self._extra is not None and name in self.extra:
            self._extra.read_into(name, box, out)
        else:
            self._dcp.read_into(self.stored[fqn], box, out)

    def ranges(self, fqn: str, box: Box) -> Iterable[StoreRange]:
        name = fqn.removeprefix(MODEL_PREFIX)
        if self._extra is not None and name in self.extra:
            return self._extra.ranges(name, box)
        return self._dcp.ranges(self.stored[fqn], box)

    def read_object(self, fqn: str) -> bytes:
        return self._dcp.read_object(fqn)

    def close(self) -> None:
        self._dcp.close()
        if self._extra is not None:
            self._extra.close()

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.sections.wrappers:
            notes.append(f"taken out of names: {', '.join(self.sections.wrappers)}")
        objects = [fqn for fqn in self._dcp.manifest.objects if self.sections.of[fqn] == MODEL]
        if objects:
            notes.append(f"left out, since they are no tensors: {name_some(objects)}")
        return tuple(notes)


@dataclasses.dataclass(frozen=True)
class ConfigFolder:
    """Where the model's config.json is, if anywhere, and which of the files there belong to the model."""

    path: Path
    side: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum((self.path / name).stat().st_size for name in self.side)


def find_config(path: Place, config: str) -> ConfigFolder:
    """The config of the model in the checkpoint `path`: that of `config` (a folder or Hub id), else of the checkpoint's
    `hf/`, else what lies in the checkpoint's folder or in the one above.

    Raises NotFoundError when `config` has no config.json, besides what `locate` raises.
    """
    if config:
        folder = locate(config, None, weights=False).path
        folder = folder.parent if folder.is_file() else folder
        if not (folder / CONFIG_NAME).is_file():
            raise NotFoundError(f"--config {config}: there is no {CONFIG_NAME}")
        return ConfigFolder(model_folder(folder), tuple(_model_files(folder)))
    own = path / "hf"
    if own.is_dir():
        return ConfigFolder(model_folder(own), tuple(side_files(own)))
    places = (path / SIDE_FOLDER, path, path.parent)
    near = next((place for place in places if _is_config(place / CONFIG_NAME)), None)
    if near is None:
        return ConfigFolder(fetched(own, ()))
    names = _model_files(near)
    return ConfigFolder(fetched(near, names), tuple(names), (f"the config is that of {near}",))


def _is_config(path: Place) -> bool:
    """Is it a model's config? Trainers call theirs of a run so too."""
    if not path.is_file():
        return False
    try:
        record = read_json(path)
    except DamagedError:
        return True  # which is said where it is read
    return isinstance(record, dict) and not record.keys().isdisjoint(_CONFIG_KEYS)


def _model_files(folder: Place) -> list[str]:
    """The side files of a model's folder; of a trainer's, which holds other things too, those known to be a model's."""
    names = side_files(folder)
    if weight_kind([file.name for file in folder.iterdir()]) is None:
        names = [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in _MODEL_FILES)]
    return names


def _what_it_holds(path: Place, counts: dict[str, int]) -> str:
    held = ", ".join(f"{section} ({number})" for section, number in counts.items()) or "nothing"
    return f"it holds {held}; ckptool inspect {path} shows their names, and --to torch exports all of it"
