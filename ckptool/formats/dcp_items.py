"""Small items of a DCP checkpoint replaced: one data file more and a new `.metadata`; every other file as it was."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.tensors import Chunk, Locator, ObjectEntry, TensorEntry
from ckptool.formats.dcp_metadata import METADATA_FILE
from ckptool.formats.dcp_torch import to_torch_metadata, write_metadata
from ckptool.formats.tensor_digest import digest_tensor
from ckptool.storage.digests_file import DIGESTS_FILE, Digests, TensorRecord
from ckptool.storage.files import os_errors
from ckptool.storage.hashing import write_digests

if TYPE_CHECKING:
    from torch import Tensor


def link_files(source: Path, target: Path, leave_out: frozenset[str]) -> frozenset[str]:
    """Fill folder `target` with the files of `source`, as hard links: the bytes are the same, and none is copied.

    Left out are the names (relative to `source`) in `leave_out`, `.metadata` and `digests.json`, which `replace_items`
    writes. Returns the names of the others. Where the filesystem has no hard links, files are copied.
    """
    linked = set()
    with os_errors(source):
        for folder, _, names in os.walk(source):
            relative = Path(folder).relative_to(source)
            (target / relative).mkdir(exist_ok=True)
            for name in names:
                path = (relative / name).as_posix()
                if path not in leave_out | {METADATA_FILE, DIGESTS_FILE}:
                    _link(Path(folder, name), target / path)
                    linked.add(path)
    return frozenset(linked)


def replace_items(
    folder: Path,
    manifest: Manifest,
    digests: Digests | None,
    linked: frozenset[str],
    file_name: str,
    tensors: Mapping[str, Tensor],
    objects: Mapping[str, str],
) -> None:
    """Finish `folder`, in which the files `linked` of `manifest`'s checkpoint are, with other values for these fqns.

    The values go into the new file `file_name`; `.metadata` points there, and is written last. Without `digests` the
    checkpoint had none and gets none.
    """
    from torch.distributed.checkpoint.metadata import StorageMeta

    new_tensors, new_objects = dict(manifest.tensors), dict(manifest.objects)
    records: dict[str, TensorRecord] = {}
    with os_errors(folder), (folder / file_name).open("wb") as file:
        for fqn, tensor in tensors.items():
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            box = Box((0,) * len(shape), shape)
            new_tensors[fqn] = TensorEntry(fqn, dtype, shape, (Chunk(box, _append(file, file_name, tensor)),))
            records[fqn] = TensorRecord(dtype, shape, digest_tensor(tensor, box, shape))
        for fqn, value in objects.items():
            new_objects[fqn] = ObjectEntry(fqn, _append(file, file_name, value))
    metadata = to_torch_metadata(dataclasses.replace(manifest, tensors=new_tensors, objects=new_objects))
    save_id = manifest.save_id
    if digests is not None:
        files = {name: digest for name, digest in digests.files.items() if name in linked}
        save_id = write_digests(folder, files, {**digests.tensors, **records})
    metadata.storage_meta = StorageMeta(save_id=save_id)
    write_metadata(folder, metadata)


def _append(file: io.BufferedWriter, file_name: str, value: object) -> Locator:
    """Write a value as `torch.save` does, which is what DCP stores, and say where."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    start = file.tell()
    file.write(buffer.getvalue())
    return Locator(file_name, start, buffer.tell())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:
        shutil.copyfile(source, target)
