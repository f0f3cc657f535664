"""Atomic publishing: write into a hidden sibling, flush it to the disk, then rename it to its final name.

A checkpoint under its final name is therefore complete. `.NAME.staging` is where NAME is being written: a lock folder,
so a second writer is refused, with the content in a subfolder that belongs to this one writer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptool.errors import AccessError, LockedError, StorageError, TargetExistsError
from ckptool.storage.exchange import exchange
from ckptool.storage.files import Place, fsync_path, os_errors
from ckptool.storage.lock import Lock, acquire
from ckptool.storage.store_path import StorePath
from ckptool.storage.upload import Upload, refuse_existing_in_store

STAGING_MARK = ".staging"
_REPLACED = "replaced"

#: Stands for work that no other attempt goes on with.
_NO_RESUME = ""

#: A folder is only ever overwritten when it holds one of these: a mistyped path must not cost anybody a home folder.
_MODEL_FILES = (".metadata", "ckptool.json", "*.distcp", "*.safetensors")


@dataclass(frozen=True)
class Staging:
    """A target being written: make `content`, a folder or a file, then `publish`."""

    target: Path
    lock: Lock
    overwrite: bool
    is_file: bool = False

    @property
    def content(self) -> Path:
        # In a folder of this writer alone: what another, thought dead, may still write goes elsewhere. Under its final
        # name: torch.save puts a file's name into the file.
        return self.lock.folder / f"content-{self.lock.owner.token}" / self.target.name

    def publish(self) -> None:
        """Flush the content to the disk, give it its final name, flush that, and only then remove what it replaced.

        Raises TargetExistsError when the target was taken meanwhile, LockedError when another writer has taken over.
        """
        self.lock.check_held()
        with os_errors(self.content):
            _flush_tree(self.content)
        self.lock.check_held()
        refuse_existing(self.target, self.overwrite, self.is_file)
        with os_errors(self.target):
            if self.overwrite and os.path.lexists(self.target):
                self._replace()
            else:
                os.rename(self.content, self.target)
            fsync_path(self.target.parent)
        self.lock.release()

    def discard(self) -> None:
        """Remove everything written so far."""
        self.lock.release()

    def suspend(self) -> None:
        """Leave everything to whoever writes this target next."""
        self.lock.give_up()

    def _replace(self) -> None:
        if exchange(self.content, self.target):
            return
        # Killed between these two renames, the target is missing; `recover` puts the old one back.
        replaced = self.lock.folder / _REPLACED
        os.rename(self.target, replaced)
        try:
            os.rename(self.content, self.target)
        except OSError:
            os.rename(replaced, self.target)
            raise


def staging_path(target: Path) -> Path:
    """The lock folder of `target`: a hidden sibling, on the same filesystem so that the rename is atomic."""
    return target.parent / f".{target.name}{STAGING_MARK}"


def is_staging(path: Place) -> bool:
    """True for lock folders, and for what is left of one beside it."""
    name = path.name
    return name.startswith(".") and (name.endswith(STAGING_MARK) or f"{STAGING_MARK}-" in name)


def refuse_existing(target: Place, overwrite: bool = False, is_file: bool = False) -> None:
    """Raise TargetExistsError unless `target` is free (an empty folder counts as free), or may be overwritten.

    Overwritten are only files by a file, and folders by a folder that hold a model and nothing that could be anybody's
    work: no hidden folder such as `.git`, no other checkpoint.
    """
    if isinstance(target, StorePath):
        refuse_existing_in_store(target, overwrite, is_file)
        return
    if not os.path.lexists(target):
        return
    if is_file or not target.is_dir():
        if not is_file or not target.is_file():
            raise TargetExistsError(f"{target} is in the way and can't be replaced", hint="choose another name")
    elif not any(target.iterdir()):
        return
    if not overwrite:
        raise TargetExistsError(f"{target} already exists", hint="choose another name, or replace it with --overwrite")
    reason = "" if is_file else _why_not_overwrite(target)
    if reason:
        raise TargetExistsError(f"{target} {reason}, and is not overwritten", hint="remove it yourself first")


def _why_not_overwrite(folder: Path) -> str:
    if not any(any(folder.glob(pattern)) for pattern in _MODEL_FILES):
        return "is a folder without a model in it"
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.is_dir()]
    if hidden:
        return f"holds {hidden[0]}"
    inner = next(folder.glob("*/**/.metadata"), None)
    if inner is not None:
        return f"holds another checkpoint, {inner.parent.name}"
    return ""


def create_staging(
    target: Path,
    overwrite: bool = False,
    patience_seconds: float = 0.0,
    is_file: bool = False,
    keep_left: bool = False,
) -> Staging:
    """Take the lock on `target`, which must be free or is to be overwritten; remove what a dead writer left.

    With patience, a writer on a machine that can't be seen from here is waited for until it is done or counts as gone.
    With `keep_left`, what a dead writer left becomes this one's content, in whatever state it is. Raises
    TargetExistsError, LockedError, StorageError or AccessError.
    """
    refuse_existing(target, overwrite, is_file)
    with os_errors(target.parent):
        _make_folders(target.parent)
    staging = Staging(target, acquire(staging_path(target), patience_seconds), overwrite, is_file)
    try:
        with os_errors(staging.lock.folder):
            _restore(staging)
            staging.lock.clear(keep=[left.name for left in _contents(staging.lock.folder)] if keep_left else ())
            _adopt(staging, keep_left)
        refuse_existing(target, overwrite, is_file)
    except BaseException:
        staging.discard()
        raise
    return staging


def recover(target: Place) -> None:
    """Put back a target that a killed writer had moved aside in order to replace it.

    Does nothing while its writer lives, or when the folder may not be written to.
    """
    if (
        isinstance(target, StorePath)
        or os.path.lexists(target)
        or not os.path.lexists(staging_path(target) / _REPLACED)
    ):
        return
    with contextlib.suppress(LockedError, AccessError, StorageError):
        create_staging(target, overwrite=True).discard()


def is_being_written(target: Place) -> bool:
    """Whether a writer of `target` is at it, or has left something; of a store that isn't known, and taken to be so."""
    return isinstance(target, StorePath) or os.path.lexists(staging_path(target))


def staged_bytes(target: Path) -> int:
    """What the contents staged for `target` take on the disk, and would give back; 0 when there are none.

    Files that have another name elsewhere give nothing back, and what can't be looked at isn't counted.
    """
    num_bytes = 0
    for content in _contents(staging_path(target)):
        for folder, _, names in os.walk(content):
            for name in names:
                with contextlib.suppress(OSError):
                    stat = os.lstat(os.path.join(folder, name))
                    # A hole takes no block; a plan counts bytes, not the rest of a file's last block.
                    num_bytes += min(stat.st_size, stat.st_blocks * 512) if stat.st_nlink == 1 else 0
    return num_bytes


def target_of(staging: Path) -> Path:
    """The final path of what a lock folder was to become."""
    return staging.parent / staging.name.partition(STAGING_MARK)[0].removeprefix(".")


@contextlib.contextmanager
def staged_directory(target: Place, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder; publish it as `target` when the block ends well, remove it when it raises."""
    with _staged(_begin(target, overwrite)) as content:
        with os_errors(content):
            content.mkdir()
        yield content


@contextlib.contextmanager
def staged_file(target: Place, overwrite: bool = False) -> Iterator[Path]:
    """The same for a single file: yield the path to write it to."""
    with _staged(_begin(target, overwrite, is_file=True)) as content:
        yield content


def _begin(target: Place, overwrite: bool, is_file: bool = False) -> Staging | Upload:
    if isinstance(target, Path):
        return create_staging(target, overwrite, is_file=is_file)
    upload = Upload(target, overwrite, is_file)
    upload.begin(_NO_RESUME, resume=False)
    return upload


@contextlib.contextmanager
def _staged(staging: Staging | Upload) -> Iterator[Path]:
    try:
        yield staging.content
        staging.publish()
    except BaseException:
        staging.discard()
        raise


def _contents(folder: Path) -> list[Path]:
    """What writers have left in the lock folder, dead ones and one that may live."""
    return sorted(folder.glob("content-*"))


def _adopt(staging: Staging, keep_left: bool) -> None:
    """Make the folder of this writer's content: the last dead one's, if that is to be kept, or a new one."""
    left = _contents(staging.lock.folder) if keep_left else []
    for path in left[:-1]:
        shutil.rmtree(path)
    if left:
        os.rename(left[-1], staging.content.parent)
    else:
        staging.content.parent.mkdir()


def _restore(staging: Staging) -> None:
    replaced = staging.lock.folder / _REPLACED
    if os.path.lexists(replaced) and not os.path.lexists(staging.target):
        os.rename(replaced, staging.target)
        fsync_path(staging.target.parent)


def _flush_tree(top: Path) -> None:
    if not top.is_dir():
        fsync_path(top)
    for folder, _, files in os.walk(top, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def _make_folders(folder: Path) -> None:
    """`mkdir -p`, with the new entries flushed to the disk."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)
