"""A checkpoint that all ranks write together: a hidden folder that all of them see, or an upload of each rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptool.ranks import Ranks
from ckptool.storage.files import Place
from ckptool.storage.lock import SILENCE_LIMIT_SECONDS
from ckptool.storage.staging import Staging, create_staging
from ckptool.storage.upload import Upload

#: A run that was moved to another machine meets the lock of its own dead save: it waits for that to count as gone. Less
#: than the 10 minutes after which NCCL gives up on the ranks that wait.
PATIENCE_SECONDS = SILENCE_LIMIT_SECONDS + 60.0


class SharedTarget:
    """Where the ranks write: the first one's sidecars and marker, and files of each, into its `content`.

    Every method is called by all ranks, and raises on all of them what went wrong on one.
    """

    def __init__(self, target: Place, overwrite: bool, ranks: Ranks, action: str) -> None:
        """Raises TargetExistsError, LockedError, StorageError or AccessError. `content` is for the first rank to make.

        In a store whatever an earlier attempt has left there is removed.
        """
        self._ranks, self._action = ranks, action
        self._staging: Staging | Upload
        if isinstance(target, Path):
            self._staging = ranks.on_first(action, lambda: create_staging(target, overwrite, PATIENCE_SECONDS))
        else:
            self._staging = upload = ranks.agree(action, lambda: Upload(target, overwrite))
            ranks.on_first(action, lambda: upload.begin("", resume=False))
            if ranks.rank > 0:
                upload.content.mkdir()

    @property
    def content(self) -> Path:
        return self._staging.content

    def sent(self, files: Mapping[str, str]) -> None:
        """This rank has finished these files, given with their BLAKE3: into a store they go up and are read back."""
        if isinstance(self._staging, Upload):
            upload = self._staging
            self._ranks.agree(self._action, lambda: upload.send(files))
            self._ranks.agree(self._action, upload.check_sent)

    def publish(self) -> None:
        """Give all of it its name; in a store, bring up the marker."""
        self._ranks.on_first(self._action, self._staging.publish)
        if isinstance(self._staging, Upload):
            self._staging.discard()

    def discard(self) -> None:
        """Remove what this rank has written on this machine. What is in a store has no marker."""
        if isinstance(self._staging, Upload) or self._ranks.rank == 0:
            self._staging.discard()
