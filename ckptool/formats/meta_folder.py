"""Meta's own form of Llama: `params.json` and `consolidated.NN.pth`, one file for each rank of a tensor-parallel group.

Every file holds a piece of each tensor, or all of it, under the same names:
https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, NotFoundError, name_some
from ckptool.formats.torch_weights import TorchWeights
from ckptool.storage.files import Place, read_json
from ckptool.storage.place import range_reader

PARAMS_NAME = "params.json"
_PATTERN = "consolidated.*.pth"


#: The folder of a Hub repository that holds the model in Meta's form, below the one with the Hub form's config.
ORIGINAL = "original"


def find_meta(names: Collection[str]) -> str | None:
    """Of the files of a folder, those in `original/` among them: where a model in Meta's form lies, "" for the folder
    itself; None when there is none."""
    for folder in ("", ORIGINAL):
        if any(is_meta_file(name) and os.path.dirname(name) == folder for name in names):
            return folder
    return None


def is_meta_file(name: str) -> bool:
    """Is this one of the files of weights?"""
    return fnmatch.fnmatchcase(os.path.basename(name), _PATTERN)


class MetaSource:
    """The model in `folder`, or in its folder `inside`. Serves every piece as a tensor of its own, `<file>/<name>`;
    `pieces` has them by name, in the order of ranks.

    Raises DamagedError when a file lacks a name that another has.
    """

    def __init__(self, folder: Place, inside: str = "") -> None:
        self.folder = folder / inside if inside else folder
        self._reader = range_reader(folder)
        below = f"{inside}/" if inside else ""
        files = sorted(below + path.name for path in self.folder.iterdir() if is_meta_file(path.name))
        if not (self.folder / PARAMS_NAME).exists():
            raise NotFoundError(f"{self.folder} has no {PARAMS_NAME}, without which its weights mean nothing")
        self.params = _read_params(self.folder / PARAMS_NAME)
        self._places: dict[str, tuple[TorchWeights, str]] = {}
        self.pieces: dict[str, list[TensorEntry]] = {}
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            weights = TorchWeights(self._reader, file)
            for name, entry in weights.tensors.items():
                fqn = f"{file}/{name}"
                tensors[fqn] = TensorEntry(fqn, entry.dtype, entry.shape, entry.chunks)
                self._places[fqn] = weights, name
                self.pieces.setdefault(name, []).append(tensors[fqn])
        if lone := [name for name, pieces in self.pieces.items() if len(pieces) != len(files)]:
            raise DamagedError(f"{self.folder}: not in all of its {len(files)} files: {name_some(lone)}")
        sizes = {file: self._reader.path_of(file).stat().st_size for file in files}
        self.manifest = Manifest(str(self.folder), tensors, files=sizes)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        weights, name = self._places[fqn]
        weights.read_into(name, box, out)

    def ranges(self, fqn: str, box: Box) -> tuple[StoreRange, ...]:
        weights, name = self._places[fqn]
        return weights.ranges(name, box)

    def read_object(self, fqn: str) -> bytes:
        raise NotFoundError(f"{self.folder}: files of weights hold no objects, so not {fqn}")

    def close(self) -> None:
        self._reader.close()


def _read_params(path: Place) -> dict[str, Any]:
    """The model's numbers, which some releases put under a key of their own."""
    record = read_json(path)
    params = record.get("model", record) if isinstance(record, dict) else None
    if not isinstance(params, dict):
        raise DamagedError(f"{path} is not a JSON object")
    return params
