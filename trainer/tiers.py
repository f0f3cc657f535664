"""The places of a run's checkpoints: its root, and with `--upload-to` a second one, to which each is brought."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import ckptool
from ckptool import CkptoolError, Place, StorageError, TargetExistsError
from trainer.config import TrainConfig
from trainer.metrics import Log

_PROGRAM = "from trainer.tiers import serve_copies; serve_copies()"


def step_of(path: Place) -> int:
    """N of a folder `step-N`; -1 for any other name."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


def step_path(root: Path | str, step: int) -> Place:
    return ckptool.place(f"{root}/step-{step}")


def later_steps(root: Path | str, step: int) -> list[str]:
    """The names `step-N` under a root with N above `step`, in order."""
    found = [path for path in ckptool.place(str(root)).glob("step-*") if step_of(path) > step]
    return [path.name for path in sorted(found, key=step_of)]


def newest(config: TrainConfig) -> tuple[Place | None, tuple[tuple[str, str], ...]]:
    """The newest complete checkpoint in any place, the root's when several have it; and (name, reason) of the later
    ones that are not complete."""
    complete = [latest.path for root in config.places if (latest := ckptool.find_latest(root)) is not None]
    path = max(complete, key=step_of, default=None)
    step = step_of(path) if path else -1
    summaries = [summary for root in config.places for summary in ckptool.list_checkpoints(root)]
    broken = {s.name: s.reason for s in summaries if not s.complete and step_of(s.path) > step}
    return path, tuple(broken.items())


def prune(root: Place, config: TrainConfig, in_use: tuple[str, ...], log: Log) -> None:
    """Remove what the run doesn't keep under a root, now that a newer checkpoint is durable there. Never a reason to
    stop training."""
    if not (config.keep_last or config.keep_every):
        return
    try:
        result = ckptool.prune(
            root, keep_last=config.keep_last, keep_every=config.keep_every, dead_saves=True, in_use=in_use
        )
    except CkptoolError as error:
        log.say(f"old checkpoints were not removed: {error}")
        return
    for name, fault in result.details["failed"].items():
        log.say(f"{name} was not removed: {fault}")


class Uploads:
    """Brings checkpoints from the root to `--upload-to`, by `ckptool.copy` in a process beside the training.

    One at a time; when several became durable meanwhile, the newest of them. The copy gets its marker when all of it is
    there and read back, and what a killed run has brought up is where the next one's copy goes on. Only the first rank
    has one.
    """

    def __init__(self, config: TrainConfig, log: Log, in_use: tuple[str, ...]) -> None:
        """`in_use` are names that pruning leaves alone."""
        self._config, self._log, self._in_use = config, log, in_use
        self._changed = threading.Condition()
        self._next: Place | None = None
        self._current: Place | None = None
        self._fault = ""
        self._has_begun = self._is_closed = False
        self._process: subprocess.Popen[str] | None = None

    @property
    def in_use(self) -> tuple[str, ...]:
        """Names of checkpoints that are on their way."""
        with self._changed:
            return tuple(path.name for path in (self._current, self._next) if path)

    def offer(self, path: Place) -> None:
        """A checkpoint under the root is durable."""
        if not self._config.upload_to:
            return
        with self._changed:
            self._next = path
            if not self._has_begun:
                self._has_begun = True
                threading.Thread(target=self._work, name="uploads", daemon=True).start()
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the newest one is there. Raises StorageError when it could not be brought."""
        with self._changed:
            if path := self._next or self._current:
                self._log.say(f"waiting for the upload of {path.name}")
            self._changed.wait_for(lambda: self._current is None and self._next is None)
        self.close()
        if self._fault:
            raise StorageError(self._fault, hint="the checkpoint is whole under the root; ckptool copy brings it there")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                path = self._current = cast(Place, self._next)
                self._next = None
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = _start_process()
                self._fault = self._bring(self._process, path)
                if self._is_closed:
                    return
                if self._fault:
                    self._log.say(self._fault)
                else:
                    prune(ckptool.place(self._config.upload_to), self._config, self._in_use, self._log)
            except Exception as error:  # whatever it is, the run must not wait for it for ever
                shown = ckptool.place(self._config.upload_to)
                self._fault = f"{path.name} was not brought to {shown}: {type(error).__name__}"
                self._log.say(self._fault)
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _bring(self, process: subprocess.Popen[str], path: Place) -> str:
        """Copy one checkpoint; what went wrong, or ""."""
        target = f"{self._config.upload_to}/{path.name}"
        rate = self._config.upload_mb_per_s * 1e6
        try:
            print(json.dumps([str(path), target, rate]), file=process.stdin, flush=True)
            fault = json.loads(cast(IO[str], process.stdout).readline())
        except (OSError, ValueError):  # no answer, or half of one
            fault = "the process that uploads has died"
        return f"{path.name} was not brought to {ckptool.place(target)}: {fault}" if fault else ""


def _start_process() -> subprocess.Popen[str]:
    top = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [top, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def serve_copies() -> None:
    """What the process does: copies that it is told of, a JSON line [from, to, bytes a second] each; it answers each
    with what went wrong, or ""."""
    # Signals are for the process that trains, which waits for this one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    requests: SimpleQueue[list[Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while True:
        source, target, rate = requests.get()
        print(json.dumps(_copy(source, target, rate)), flush=True)


def _listen(requests: SimpleQueue[list[Any]]) -> None:
    """When the training process is gone this one goes too, in the middle of what it does."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(1)


def _copy(source: str, target: str, bytes_per_s: float) -> str:
    try:
        try:
            ckptool.copy(source, target, max_bytes_per_s=bytes_per_s)
        except TargetExistsError:
            # The run before brought it, and this one went on from it; or it is another run's.
            if ckptool.weights_digest(ckptool.place(source)) != ckptool.weights_digest(ckptool.place(target)):
                return "another run's checkpoint of that name is there"
    except CkptoolError as error:
        return str(error)
    return ""
