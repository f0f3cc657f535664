"""Hugging Face folders: shards of weights, their index, and the side files that make a model of them."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, MismatchError, NotFoundError, UnsupportedError, name_some
from ckptool.formats.hf_consumed import CONSUMED_SUFFIX, is_consumed, original_name
from ckptool.formats.safetensors_file import read_header
from ckptool.formats.torch_weights import TorchWeights
from ckptool.storage.fetch_ahead import FetchAhead
from ckptool.storage.files import Place, os_errors, read_json, safe_join
from ckptool.storage.place import fetched, files_below, range_reader
from ckptool.storage.store_path import StorePath

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_SINGLE_NAME = "pytorch_model.bin"

#: Tensors of the source that the model has no use for, kept in a checkpoint's `hf/` for its exports.
EXTRA_NAME = "ckptool-extra.safetensors"

#: Of most files of weights this has the whole description.
_HEADER_BYTES = 128 << 10

#: Endings of files that `torch.save` wrote.
TORCH_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt")

#: Files that hold weights (in whichever framework), or that index them: never side files.
WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin.index.json",
    "pytorch_model*.bin",
    "adapter_model*.bin",
    "*.pth",
    "*.pt",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
    "*.distcp",
    f"*{CONSUMED_SUFFIX}",
)


@dataclass(frozen=True)
class WeightKind:
    """How a folder's files of weights are named: all of them, the one of a small model, the index of a large one's."""

    pattern: str
    single: str
    index: str


#: In transformers' order of preference.
WEIGHT_KINDS = (
    WeightKind("*.safetensors", SINGLE_NAME, INDEX_NAME),
    WeightKind("pytorch_model*.bin", TORCH_SINGLE_NAME, TORCH_INDEX_NAME),
)


def weight_kind(names: Collection[str]) -> WeightKind | None:
    """The kind of weights that a folder of these files is read from; None when it has no such weights."""
    for kind in WEIGHT_KINDS:
        if kind.index in names or any(fnmatch.fnmatchcase(name, kind.pattern) for name in names):
            return kind
    return None


class HfSource:
    """A Hugging Face folder, or one of its weight files, as a Source. `notes` says what was left aside and why.

    The weights are safetensors files, or, where there are none, the older `pytorch_model*.bin`.
    """

    def __init__(self, path: Place) -> None:
        self.folder: Place = path if path.is_dir() else path.parent
        self._reader = range_reader(self.folder)
        self._torch_files: dict[str, TorchWeights] = {}
        self.notes: list[str] = []
        #: Files of which something has been read.
        self.files_read: set[str] = set()
        self.index: dict[str, str] = {}
        files = [self._stored_name(file) for file in self._weight_files()] if path.is_dir() else [path.name]
        tensors = self._read_tensors(files)
        sizes = {file: self._reader.path_of(file).stat().st_size for file in files}
        self.manifest = Manifest(str(path), tensors, files=sizes)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        entry = self.manifest.tensors[fqn]
        locator = entry.chunks[0].locator
        if locator is None or not box.is_contiguous_in(entry.shape):
            raise DamagedError(f"{self.folder}: {fqn} can only be read in runs of rows")
        if is_consumed(locator.file):
            raise NotFoundError(
                f"{self.folder / original_name(locator.file)} was deleted by --consume, and its bytes are needed again",
                hint="get the model anew",
            )
        self.files_read.add(locator.file)
        if locator.file in self._torch_files:
            self._torch_files[locator.file].read_into(fqn, box, out)
            return
        start = locator.offset + box.flat_start(entry.shape) * entry.itemsize_bytes
        self._reader.read_into(locator.file, start, out)

    def ranges(self, fqn: str, box: Box) -> tuple[StoreRange, ...]:
        entry = self.manifest.tensors[fqn]
        locator = entry.chunks[0].locator
        if locator is None or not box.is_contiguous_in(entry.shape):
            return ()
        if locator.file in self._torch_files:
            return self._torch_files[locator.file].ranges(fqn, box)
        start = locator.offset + box.flat_start(entry.shape) * entry.itemsize_bytes
        return self._reader.ranges(locator.file, start, box.num_elements * entry.itemsize_bytes)

    def read_object(self, fqn: str) -> bytes:
        raise NotFoundError(f"{self.folder}: files of weights hold no objects, so not {fqn}")

    def close(self) -> None:
        self._reader.close()

    def _weight_files(self) -> list[str]:
        """The files to read: those of the index when there is one, else every one of the kind."""
        names = sorted({original_name(path.name) for path in self.folder.iterdir()})
        kind = weight_kind(names)
        if kind is None:
            raise self._nothing_to_read(names)
        present = fnmatch.filter(names, kind.pattern)
        if kind.index in names:
            self.index = read_index(self.folder / kind.index)
            listed = sorted(set(self.index.values()))
            absent = [file for file in listed if not self._reader.path_of(self._stored_name(file)).exists()]
            if absent:
                raise DamagedError(f"{self.folder}: the index names files that are not there: {name_some(absent)}")
            if kind.single in present and kind.single not in listed:
                raise MismatchError(
                    f"{self.folder} holds two models: {kind.single}, which transformers loads, and the shards of the "
                    f"index",
                    hint="remove the one that you don't mean",
                )
            if stray := sorted(set(present) - set(listed)):
                self.notes.append(f"ignored, not in the index: {name_some(stray)}")
            return listed
        if kind.single in present and len(present) > 1:
            self.notes.append(f"ignored beside {kind.single}: {name_some(set(present) - {kind.single})}")
            return [kind.single]
        return present

    def _stored_name(self, file: str) -> str:
        """The name of a file, or of its stand-in when it was consumed."""
        stand_in = file + CONSUMED_SUFFIX
        return stand_in if (self.folder / stand_in).exists() and not (self.folder / file).exists() else file

    def _nothing_to_read(self, names: list[str]) -> Exception:
        others = [name for name in names if is_weight_file(name)]
        if others:
            return UnsupportedError(
                f"{self.folder} has neither safetensors files nor pytorch_model.bin, only {name_some(others)}",
                hint="give a file itself when it holds the whole model",
            )
        return NotFoundError(f"{self.folder} has no safetensors files", hint="is it a Hugging Face model folder?")

    def _read_tensors(self, files: Sequence[str]) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        with FetchAhead(self._reader.ranges(file, 0, _HEADER_BYTES) for file in files) as ahead:
            for file in files:
                for name, entry in self._read_file(file).items():
                    if self.index and self.index.get(name) != original_name(file):
                        self.notes.append(f"ignored, not in the index: {name} of {file}")
                        continue
                    if name in tensors:
                        raise DamagedError(f"{self.folder}: tensor {name} is in more than one file")
                    tensors[name] = entry
                ahead.passed()
        if absent := set(self.index) - set(tensors):
            raise DamagedError(f"{self.folder}: the index names tensors that their files lack: {name_some(absent)}")
        return tensors

    def _read_file(self, file: str) -> Mapping[str, TensorEntry]:
        if file.endswith(TORCH_SUFFIXES):
            self._torch_files[file] = TorchWeights(self._reader, file)
            return self._torch_files[file].tensors
        return read_header(self._reader, file)[0]


def read_index(path: Place) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> file name. Raises DamagedError when it is no such map."""
    record = read_json(path)
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise DamagedError(f"{path}: no weight_map of tensor names to file names")
    return weight_map


def is_weight_file(name: str) -> bool:
    return any(fnmatch.fnmatchcase(os.path.basename(name), pattern) for pattern in WEIGHT_PATTERNS)


def side_files(folder: Place) -> list[str]:
    """Every file below `folder` that holds no weights, as relative names; hidden files and folders are left out.

    Raises UnsafeError for a link out of the folder: a stranger's link must not pick files of this machine to be copied.
    """
    names = [name for name in files_below(folder) if not is_weight_file(name)]
    return sorted(name for name in names if safe_join(folder, name).is_file())


def model_folder(folder: Place) -> Path:
    """A local folder with what a model needs beside its weights: `folder` itself, or copies of a store's side files."""
    return fetched(folder, side_files(folder) if isinstance(folder, StorePath) else ())


def copy_side_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the named files, byte for byte, following links inside the folder (a Hub cache is made of them)."""
    for name in names:
        destination = target / name
        with os_errors(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(safe_join(source, name), destination)
