"""A trainer's checkpoint as it is stored: in DCP's own format, or in safetensors files of the ranks' parts."""

from __future__ import annotations

import contextlib

from ckptool.core.checkpoint import Manifest
from ckptool.errors import NotFoundError
from ckptool.formats.dcp_metadata import checkpoints_inside, is_checkpoint, read_manifest
from ckptool.formats.dcp_source import DcpSource
from ckptool.formats.sharded_safetensors import ShardedSafetensors, is_sharded_folder
from ckptool.ops.checks.shard_shapes import check_shard_shapes
from ckptool.runs import model_places, possible_places, resolve
from ckptool.storage.files import Place

StoredSource = DcpSource | ShardedSafetensors

#: Where NeMo Automodel keeps them in the folder of a step.
_MODEL_FOLDER = "model"

_UNSUMMED = "safetensors files carry no checksums: the bytes read were compared with nothing"


def find_stored(name: str, root: Place | None = None) -> Place:
    """The folder of the checkpoint that `name` means, in either form. Raises as `resolve` does."""
    for path in model_places(name, root):
        if path.is_dir() and not is_checkpoint(path):
            for folder in (path, path / _MODEL_FOLDER):
                if folder.is_dir() and is_sharded_folder(folder):
                    return folder
    try:
        return resolve(name, root)
    except NotFoundError as error:
        folders = (path for path in possible_places(name, root) if path.is_dir())
        whole = next((path for path in folders if any(path.glob("*.safetensors"))), None)
        if whole is None or checkpoints_inside(whole):
            raise
        raise NotFoundError(
            f"{whole} holds a model in safetensors files, which is not a checkpoint: it has no .metadata",
            hint=f"ckptool import-hf {whole} makes one (without a config.json beside them, tensors keep their names)",
        ) from error


def open_stored(path: Place) -> StoredSource:
    return DcpSource(path) if is_checkpoint(path) or not is_sharded_folder(path) else ShardedSafetensors(path)


def read_stored(path: Place) -> Manifest:
    """What it holds. Raises as `read_manifest` and `ShardedSafetensors` do."""
    if is_checkpoint(path) or not is_sharded_folder(path):
        return read_manifest(path)
    source = ShardedSafetensors(path)
    source.close()
    return source.manifest


def stored_notes(path: Place) -> tuple[str, ...]:
    """What to say to who copies the checkpoint. Of DCP in safetensors the shapes are checked: raises as
    `check_shard_shapes` does."""
    if is_checkpoint(path) or not is_sharded_folder(path):
        return ()
    with contextlib.closing(ShardedSafetensors(path)) as source:
        return source_notes(source)


def source_notes(source: StoredSource) -> tuple[str, ...]:
    """The same for a checkpoint that is open."""
    return (*check_shard_shapes(source), _UNSUMMED) if isinstance(source, ShardedSafetensors) else ()


def count_notes(path: Place) -> tuple[str, ...]:
    """What to say to who looks at the checkpoint: of DCP in safetensors without a config, how many files were found."""
    if is_checkpoint(path) or not is_sharded_folder(path):
        return ()
    with contextlib.closing(ShardedSafetensors(path)) as source:
        return tuple(source.notes)
