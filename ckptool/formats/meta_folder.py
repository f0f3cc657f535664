"""Meta's own form of Llama: `params.json` and `consolidated.NN.pth`, one file for each rank of a tensor-parallel group.

Every file holds a piece of each tensor, or all of it, under the same names:
https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import TensorEntry
from ckptool.errors import DamagedError, NotFoundError, name_some
from ckptool.formats.torch_weights import TorchWeights
from ckptool.storage.files import Place, read_json
from ckptool.storage.place import range_reader

PARAMS_NAME = "params.json"
_PATTERN = "consolidated.*.pth"


def is_meta_folder(names: Iterable[str]) -> bool:
    """True for a folder of these files that holds a model in Meta's form."""
    return any(fnmatch.fnmatchcase(name, _PATTERN) for name in names)


class MetaSource:
    """Serves every piece as a tensor of its own, `<file>/<name>`; `pieces` has them by name, in the order of ranks.

    Raises DamagedError when a file lacks a name that another has.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._reader = range_reader(folder)
        files = sorted(fnmatch.filter([path.name for path in folder.iterdir()], _PATTERN))
        if not (folder / PARAMS_NAME).exists():
            raise NotFoundError(f"{folder} has no {PARAMS_NAME}, without which its weights mean nothing")
        self.params = _read_params(folder / PARAMS_NAME)
        self._weights = {file: TorchWeights(self._reader, file) for file in files}
        self.pieces: dict[str, list[TensorEntry]] = {}
        tensors: dict[str, TensorEntry] = {}
        for file, weights in self._weights.items():
            for name, entry in weights.tensors.items():
                fqn = f"{file}/{name}"
                tensors[fqn] = TensorEntry(fqn, entry.dtype, entry.shape, entry.chunks)
                self.pieces.setdefault(name, []).append(tensors[fqn])
        if lone := [name for name, pieces in self.pieces.items() if len(pieces) != len(files)]:
            raise DamagedError(f"{folder}: not in all of its {len(files)} files: {name_some(lone)}")
        sizes = {file: self._reader.path_of(file).stat().st_size for file in files}
        self.manifest = Manifest(str(folder), tensors, files=sizes)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        file, _, name = fqn.partition("/")
        self._weights[file].read_into(name, box, out)

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
