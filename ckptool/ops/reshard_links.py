"""Resharding without writing a tensor again: where the stored chunks already fit, the data files get a second name."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.layout import Layout
from ckptool.core.mesh import Mesh, Placement, split
from ckptool.errors import StorageError
from ckptool.formats.dcp_torch import add_aliases, commit, to_torch_metadata, write_metadata
from ckptool.storage.digests_file import Digests
from ckptool.storage.files import Place, os_errors, safe_join
from ckptool.storage.store_path import StorePath


def fits(manifest: Manifest, layout: Layout) -> bool:
    """True when each chunk lies within one box of a rank: no rank has to read a byte that it doesn't hold."""
    return all(
        _nest(entry.shape, tuple(chunk.box for chunk in entry.chunks), layout.mesh, layout.placements[fqn])
        for fqn, entry in manifest.tensors.items()
        if fqn not in manifest.ties
    )


@functools.lru_cache(maxsize=64)
def _nest(shape: tuple[int, ...], chunks: tuple[Box, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> bool:
    boxes = [box for held in split(shape, mesh, placements) for box in held.boxes]
    return all(any(box.contains(chunk) for box in boxes) for chunk in chunks if chunk.num_elements)


def can_link(path: Place, target: Place) -> bool:
    """True when files of `path` can have a second name where `target` is to be: both are on one filesystem."""
    if isinstance(path, StorePath) or isinstance(target, StorePath):
        return False
    folder = next(parent for parent in target.parents if parent.exists())
    with os_errors(path):
        if os.stat(path).st_dev != os.stat(folder).st_dev:
            return False
    return hasattr(os, "link")


def link_checkpoint(path: Path, staging: Path, manifest: Manifest, digests: Digests | None) -> None:
    """Give the data files of `path` a second name in `staging`, and describe them there anew, their digests kept.

    A checkpoint without digests gets none: nothing of it was read. Raises StorageError when the filesystem has no hard
    links, or the system allows none to files of others.
    """
    for name in manifest.files:
        file, link = safe_join(path, name), safe_join(staging, name)
        with os_errors(staging):
            link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, link)
        except OSError as error:
            raise StorageError(
                f"{file} can't have a second name: {error.strerror}", hint="--rewrite writes files of its own"
            ) from error
    tensors = {fqn: entry for fqn, entry in manifest.tensors.items() if fqn not in manifest.ties}
    metadata = to_torch_metadata(dataclasses.replace(manifest, tensors=tensors))
    if digests is None:
        add_aliases(metadata, manifest.ties)
        write_metadata(staging, metadata)
    else:
        files = {name: digest for name, digest in digests.files.items() if name in manifest.files}
        commit(staging, metadata, manifest.ties, files, {fqn: r.digest for fqn, r in digests.tensors.items()})
