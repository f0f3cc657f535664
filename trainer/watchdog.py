"""One rank's error, death or silence ends the run on every rank, soon, with its cause and a stack of each rank.

Each rank's thread writes a beat to the store every second: where the rank is and since when. Rank 0's thread reads all
beats, the others rank 0's. The first failure anybody sees is written under one key; every rank that reads it leaves its
stack in ROOT/failures/ and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptool import CkptoolError
from trainer.failures import Failure, is_lost_contact
from trainer.parallel import Ranks
from trainer.signals import StopSignals
from trainer.stopwatch import STARTING, Stopwatch

BEAT_SECONDS = 1.0
#: A rank that is silent for so long counts as dead; torchrun kills the others 30 s after it has sent them a signal.
SILENCE_SECONDS = 60.0
SILENCE_SECONDS_AFTER_A_SIGNAL = 10.0
#: How long ranks wait for each other to leave their stacks, or to end with an error that they share.
GRACE_SECONDS = 5.0
#: Starting and saving may take so many times longer than a phase of a step.
PATIENCE = 6


class Watchdog:
    """Watches while entered. `limit_seconds` bounds a phase of a step; 0 watches for death and errors only."""

    def __init__(
        self, ranks: Ranks, stopwatch: Stopwatch, stop: StopSignals, folder: Path, limit_seconds: float
    ) -> None:
        self._ranks, self._stopwatch, self._stop = ranks, stopwatch, stop
        self._folder, self._limit_seconds = folder, limit_seconds
        # A connection of its own, because the main thread may wait on the other one; and a name of its own, because a
        # process may train several times in one group.
        name = ranks.from_rank0(lambda: f"watchdog {uuid.uuid4().hex}")
        self._store = dist.PrefixStore(name, cast(Any, dist.distributed_c10d._get_default_store()).clone())
        self._over = threading.Event()
        self._is_ending = False
        self._main = threading.get_ident()
        self._heard: dict[int, tuple[str, float]] = {}

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_ending = True
        try:
            if isinstance(error, Exception):
                self._report(error)
        finally:
            self._over.set()
            self._thread.join()
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                self._store.set(f"beat/{self._ranks.rank}", json.dumps({"is_over": True}))

    def _report(self, error: Exception) -> None:
        """Tell the others. Raises the failure that came first instead of `error`, when that is another rank's."""
        mine = Failure.of(error, self._ranks.rank, self._stopwatch)
        trace = "".join(traceback.format_exception(error))
        try:
            if is_lost_contact(error):
                mine = self._origin_of_silence() or mine
            first = Failure.from_json(self._store.compare_set("failure", "", mine.to_json()))
            if first.cause != Failure.of(error, self._ranks.rank, self._stopwatch).cause:
                self._leave_stack(trace)
                raise CkptoolError(first.line(), hint=f"the stack of each rank is in {self._folder}") from error
            if not mine.is_expected:
                self._leave_stack(trace)
            self._store.add("ended", 1)
            self._await("ended")
            if mine.is_expected and self._store.add("stacks", 0):
                self._leave_stack(trace)
        except RuntimeError:  # without a store each rank has its own error only
            if is_lost_contact(error):
                self._leave_stack(trace)
                where = f"in step {mine.step + 1} ({mine.phase})"
                raise CkptoolError(
                    f"contact with the other ranks was lost {where}, and with the run's store: did rank 0 end?",
                    hint=f"the stack of each rank is in {self._folder}",
                ) from error

    def _origin_of_silence(self) -> Failure | None:
        """Who is gone: the rank that reports its own error meanwhile, else one whose beat has stopped."""
        before = self._beats()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._store.check(["failure"]):
                return None
            time.sleep(BEAT_SECONDS / 4)
        after = self._beats()
        silent = [r for r in range(self._ranks.world_size) if r != self._ranks.rank and before[r] == after[r]]
        if not silent:
            return None
        # It stopped where this rank waits for it; its last beat may be older.
        host = after[silent[0]].get("host", "?")
        return Failure(silent[0], host, self._stopwatch.step, self._stopwatch.phase, "it died")

    def _await(self, counter: str) -> None:
        """Stay until every rank has counted itself, or a while: with rank 0 the store may end."""
        deadline = time.monotonic() + GRACE_SECONDS
        while self._store.add(counter, 0) < self._ranks.world_size and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(BEAT_SECONDS):
            number += 1
            try:
                self._store.set(f"beat/{self._ranks.rank}", json.dumps(self._beat(number)))
                if not self._store.check(["failure"]):
                    failure = self._find_failure()
                    if failure is None:
                        continue
                    self._store.compare_set("failure", "", failure.to_json())
                failure = Failure.from_json(self._store.get("failure"))
            except RuntimeError as error:
                cause = f"the run's store is gone ({str(error).partition(chr(10))[0]}): did rank 0's machine end?"
                failure = Failure(0, "?", self._stopwatch.step, self._stopwatch.phase, cause)
                if self._over.wait(GRACE_SECONDS):
                    return
            self._end(failure)

    def _beat(self, number: int) -> dict[str, Any]:
        where, is_waiting = _place(sys._current_frames().get(self._main))
        watch = self._stopwatch
        return {
            "number": number,
            "host": socket.gethostname(),
            "step": watch.step,
            "phase": watch.phase,
            "num_marks": watch.num_marks,
            "age_seconds": watch.age_seconds,
            "may_take_long": watch.may_take_long,
            "num_collectives": _num_collectives() if self._ranks.device.type == "cuda" else 0,
            "where": where,
            "is_waiting": is_waiting,
        }

    def _find_failure(self) -> Failure | None:
        """A rank that is silent or stands still, as far as this rank looks after the others."""
        beats = self._beats() if self._ranks.rank == 0 else {0: self._beat_of(0)}
        limit = SILENCE_SECONDS_AFTER_A_SIGNAL if self._stop.received else SILENCE_SECONDS
        for rank, beat in beats.items():
            text, since = self._heard.get(rank, ("", 0.0))
            if text != json.dumps(beat):
                self._heard[rank] = (json.dumps(beat), time.monotonic())
            elif not beat.get("is_over") and time.monotonic() - since > limit:
                return self._failure_of(rank, beat, f"nothing was heard of it for {limit:.0f} s")
        running = {rank: beat for rank, beat in beats.items() if beat.get("number")}
        if not (self._ranks.rank == 0 and any(self._stands_still(beat) for beat in running.values())):
            return None

        # Those that wait in a collective wait for the one that is behind, or that is somewhere else.
        def progress(rank: int) -> tuple[int, int, bool, int]:
            beat = running[rank]
            return beat["num_marks"], beat["num_collectives"], beat["is_waiting"], rank

        rank = min(running, key=progress)
        cause = f"no progress for {running[rank]['age_seconds']:.0f} s at {running[rank]['where']}"
        return self._failure_of(rank, running[rank], cause)

    def _stands_still(self, beat: dict[str, Any]) -> bool:
        limit = self._limit_seconds * (PATIENCE if beat["may_take_long"] else 1)
        return 0 < limit < beat["age_seconds"]

    def _failure_of(self, rank: int, beat: dict[str, Any], cause: str) -> Failure:
        return Failure(rank, beat.get("host", "?"), beat.get("step", 0), beat.get("phase", STARTING), cause)

    def _beats(self) -> dict[int, dict[str, Any]]:
        return {rank: self._beat_of(rank) for rank in range(self._ranks.world_size)}

    def _beat_of(self, rank: int) -> dict[str, Any]:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def _end(self, failure: Failure) -> None:
        """End this process, unless its main thread is ending with an error that the ranks share."""
        if (self._is_ending or failure.is_expected) and self._over.wait(2 * GRACE_SECONDS):
            return
        self._leave_stack()
        print(f"rank {self._ranks.rank}: error: {failure.line()}", file=sys.stderr)
        print(f"hint: the stack of each rank is in {self._folder}", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._store.add("ended", 1)
            self._await("ended")
        os._exit(failure.exit_code)

    def _leave_stack(self, error: str = "") -> None:
        """Write the stacks of all threads, and what NCCL's flight recorder knows, to this rank's files."""
        with contextlib.suppress(OSError):  # a full or vanished disk must not keep the run from ending
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"rank-{self._ranks.rank}.txt").open("w", encoding="utf-8") as file:
                file.write(f"step {self._stopwatch.step + 1}, {self._stopwatch.phase}\n{error}")
                file.flush()
                faulthandler.dump_traceback(file)
            if self._ranks.device.type == "cuda":
                (self._folder / f"rank-{self._ranks.rank}.collectives.json").write_bytes(_flight_recording())
        with contextlib.suppress(RuntimeError):
            self._store.add("stacks", 1)


def _flight_recording(with_collectives: bool = True) -> bytes:
    """What NCCL's flight recorder knows, as JSON; of collectives those that are not finished.

    The function's name differs between torches.
    """
    bindings = torch._C._distributed_c10d
    dump = getattr(bindings, "_dump_nccl_trace_json", None) or getattr(bindings, "_dump_fr_trace_json", None)
    return dump(with_collectives, True) if dump is not None else b"{}"


def _num_collectives() -> int:
    """How many collectives this rank has begun, over all groups: its own stack doesn't tell on a GPU."""
    groups = json.loads(_flight_recording(with_collectives=False)).get("pg_status", {})
    return sum(max(0, int(group.get("last_enqueued_collective", 0))) for group in groups.values())


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is: its innermost line outside torch, and whether it is inside torch.distributed."""
    torch_folder = str(Path(torch.__file__).parent)
    is_waiting = False
    while frame is not None and frame.f_code.co_filename.startswith(torch_folder):
        is_waiting = is_waiting or f"{os.sep}distributed{os.sep}" in frame.f_code.co_filename
        frame = frame.f_back
    if frame is None:
        return "an unknown place", is_waiting
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}", is_waiting
