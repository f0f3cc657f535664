"""A trainer's checkpoint as it is stored: in DCP's own format, or in safetensors files of the ranks' parts."""

from __future__ import annotations

from ckptool.core.checkpoint import Manifest
from ckptool.formats.dcp_metadata import is_checkpoint, read_manifest
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.sharded_safetensors import ShardedSafetensors, is_sharded_folder
from ckptool.runs import possible_places, resolve
from ckptool.storage.files import Place

StoredSource = DcpSource | ShardedSafetensors

#: Where NeMo Automodel keeps them in the folder of a step.
_MODEL_FOLDER = "model"


def find_stored(name: str, root: Place | None = None) -> Place:
    """The folder of the checkpoint that `name` means, in either form. Raises as `resolve` does."""
    for path in possible_places(name, root):
        if path.is_dir() and not is_checkpoint(path):
            for folder in (path, path / _MODEL_FOLDER):
                if folder.is_dir() and is_sharded_folder(folder):
                    return folder
    return resolve(name, root)


def open_stored(path: Place) -> StoredSource:
    return DcpSource(path) if is_checkpoint(path) or not is_sharded_folder(path) else ShardedSafetensors(path)


def read_stored(path: Place) -> Manifest:
    """What it holds. Raises as `read_manifest` and `ShardedSafetensors` do."""
    if is_checkpoint(path) or not is_sharded_folder(path):
        return read_manifest(path)
    source = ShardedSafetensors(path)
    source.close()
    return source.manifest
