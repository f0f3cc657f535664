"""The saves of a run: beside the training (`--async-save`), or while it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ckptool
from ckptool import AsyncSaver, PendingSave
from trainer import checkpoint
from trainer.checkpoint import TrainingState
from trainer.config import TrainConfig
from trainer.metrics import Log
from trainer.origin import Origin
from trainer.parallel import Ranks
from trainer.tiers import Uploads, prune, step_of


@dataclass
class SaveTimes:
    """Of one step: how long training stood still for saves, and how long the one that became durable took."""

    stall_seconds: float = 0.0
    durable_seconds: float = 0.0


class Saves:
    """Saves a state, one checkpoint at a time. A context, which is left when the last save is on the disk, and where
    `--upload-to` says.

    With `--async-save`, `state.last_saved` moves and old checkpoints go when the new one is durable, not before; the
    error of a save is raised by the next call of `collect`, `save` or `finish`.
    """

    def __init__(self, config: TrainConfig, origin: Origin, ranks: Ranks, log: Log) -> None:
        self._config, self._origin, self._ranks, self._log = config, origin, ranks, log
        self._saver = AsyncSaver() if config.async_save else None
        self._pending: PendingSave | None = None
        self._uploads = Uploads(config, log, origin.names)
        if ranks.rank == 0 and origin.is_resume and step_of(origin.path) >= 0:
            self._uploads.offer(origin.path)  # the run before may have been killed on its way
        self.times = SaveTimes()

    def save(self, state: TrainingState) -> None:
        """Save `state`, at least as far that training can go on. All ranks take part."""
        with self._stalled():
            self._finish(state)
            self._pending = checkpoint.save(
                state, self._origin, self._config, self._ranks, self._log, self._uploads, self._saver
            )
        if self._saver is None:
            self.times.durable_seconds = self.times.stall_seconds

    def before_update(self) -> None:
        """Wait until weights and optimizer may change."""
        if self._pending is not None:
            with self._stalled():
                self._pending.wait_until_copied()

    def collect(self, state: TrainingState) -> None:
        """Take note of a save that has become durable; raise the error of one that failed."""
        if self._pending is not None and self._pending.done():
            self._finish(state)

    def finish(self, state: TrainingState) -> None:
        """Wait until everything that was saved is durable."""
        with self._stalled():
            self._finish(state)

    def _finish(self, state: TrainingState) -> None:
        if self._saver is None or self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._saver.wait()
        state.last_saved = pending.target
        self.times.durable_seconds = pending.durable_seconds or 0.0

    def _prune_what_was_uploaded(self) -> None:
        """A checkpoint on its way when the last one became durable stayed under the root: no later save removes it."""
        if self._config.upload_to and self._ranks.rank == 0:
            prune(ckptool.place(str(self._config.root)), self._config, self._origin.names, self._log)

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times.stall_seconds += time.perf_counter() - began

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        try:
            if self._saver is not None:
                self._saver.__exit__(kind, *error)
            if kind is None:
                self._uploads.finish()
                self._prune_what_was_uploaded()
        finally:
            self._uploads.close()
