"""Deleting the source of an import file by file, for disks that can't hold both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptool.core.checkpoint import Manifest
from ckptool.core.parts import Part
from ckptool.errors import UsageError
from ckptool.formats.hf_consumed import CONSUMED_SUFFIX, consume, is_consumed, original_name
from ckptool.storage.files import Place, fsync_path, os_errors
from ckptool.storage.store_path import StorePath


class Consumer:
    """Knows which files of a safetensors folder the parts still need.

    A file in `kept` stays until the checkpoint is published. Not for several threads at once.
    """

    def __init__(self, folder: Path, source: Manifest, parts: Sequence[Part], kept: set[str]) -> None:
        self._folder = folder
        self._files_of = {part.files: _files(part, source) for part in parts}
        self._pending = dict.fromkeys(source.files, 0)
        for files in self._files_of.values():
            for file in files:
                self._pending[file] += 1
        self._kept = kept
        self._sizes = source.files

    def freed_bytes(self, target: Place) -> int:
        """What the disk of `target` has back before the checkpoint is whole: all but the last files, if it is there."""
        if isinstance(target, StorePath):
            return 0
        parent = next(parent for parent in target.parents if parent.exists())
        with os_errors(self._folder):
            if os.stat(parent).st_dev != os.stat(self._folder).st_dev:
                return 0
        sizes = [self._sizes[file] for file in self._pending if file not in self._kept and not is_consumed(file)]
        return max(0, sum(sizes) - 2 * max(sizes, default=0))

    def done(self, part: Part, content: Path) -> None:
        """Part of the checkpoint in the staging folder `content` is safe: delete what only it still needed."""
        for file in self._files_of[part.files]:
            self._pending[file] -= 1
            if self._pending[file] == 0 and file not in self._kept and not is_consumed(file):
                # The names of the files that hold the bytes now must be safe, too.
                for folder in (content, content.parent, content.parent.parent, content.parent.parent.parent):
                    fsync_path(folder)
                consume(self._folder / file)

    def all_done(self) -> None:
        """The checkpoint is published: delete the rest."""
        with os_errors(self._folder):
            for file in self._pending:
                original = self._folder / original_name(file)
                for path in (original, original.with_name(original.name + CONSUMED_SUFFIX)):
                    path.unlink(missing_ok=True)


def check_consumable(folder: Path, files: Sequence[str], origin_is_hub: bool, num_ranks: int) -> None:
    """Raise UsageError where deleting the source could cost somebody something."""
    if num_ranks > 1:
        raise UsageError("--consume works in one process: another rank may still need a file")
    if origin_is_hub or any((folder / file).is_symlink() for file in files):
        raise UsageError(
            f"--consume would delete from {folder}, a cache that others may use",
            hint="copy the model into a folder of its own, or import it without --consume",
        )
    if any(not file.endswith((".safetensors", CONSUMED_SUFFIX)) for file in files):
        raise UsageError("--consume works for safetensors files")


def _files(part: Part, source: Manifest) -> set[str]:
    locators = (chunk.locator for item in part.items for fqn in item.sources for chunk in source.tensors[fqn].chunks)
    return {locator.file for locator in locators if locator is not None}
