"""Saving beside the training: a snapshot is taken at once, and written and published while training goes on.

The ranks agree through a gloo group of the saver's own, in a thread, so the collectives of the training are not
disturbed. The checkpoint appears under its name when all of it is on the disk, or not at all, as with `ckptool.save`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptool.core.parts import FileRecord
from ckptool.core.position import DataPosition
from ckptool.core.provenance import Provenance
from ckptool.distributed import MAX_COMPARED_BYTES, check_same_values, write_sidecars
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_sink import DcpFile
from ckptool.formats.dcp_storage_writer import bare_provenance
from ckptool.formats.dcp_writers import DcpWriters, Finish, Load, write_file
from ckptool.ranks import Ranks
from ckptool.save_plan import Description, Held, Plan, SavePlans, Share
from ckptool.shared_target import SharedTarget
from ckptool.snapshot import (
    LOAD_BYTES,
    RING_BYTES,
    HostMemory,
    Ring,
    Shard,
    Snapshot,
    clone_on_gpu,
    copy_to_host,
    fits_on_gpu,
    loads_of,
    state_bytes,
)
from ckptool.storage.direct_file import BUFFER_BYTES
from ckptool.storage.files import Place
from ckptool.storage.place import place
from ckptool.template import Template

#: Processes that write for one rank, where there are cores enough.
MAX_WRITERS = 8

#: A state up to this size, on one rank, is written by a thread of the process itself: starting others takes longer.
SMALL_BYTES = 32 << 20

#: How long a save may go on after the training has failed.
AFTER_ERROR_SECONDS = 60.0


class PendingSave:
    """A checkpoint on its way to the disk."""

    def __init__(self, target: Place, snapshot: Snapshot) -> None:
        self.target = target
        #: How long the caller was kept, and how long after the call the checkpoint was durable (None: not yet).
        self.stall_seconds = 0.0
        self.durable_seconds: float | None = None
        self._snapshot = snapshot
        self._outcome: Future[None] = Future()

    def done(self) -> bool:
        """True when it is durable or has failed."""
        return self._outcome.done()

    def result(self, timeout_seconds: float | None = None) -> None:
        """Wait until it is durable on all ranks. Raises what `ckptool.save` does, TimeoutError when it takes longer."""
        self._outcome.result(timeout_seconds)

    def wait_until_copied(self) -> None:
        """Wait until the state may change: see `wait_for_copy` of `AsyncSaver.save`."""
        self._snapshot.wait_until_copied()


@dataclass(frozen=True)
class _Work:
    """A save, apart from its tensors: the arguments of `AsyncSaver.save`, copied."""

    target: Place
    provenance: Provenance
    ties: Mapping[str, str]
    side_folder: Path | None
    position: DataPosition | Mapping[str, Any] | None
    overwrite: bool
    paths: Mapping[str, tuple[str | int, ...]]


class AsyncSaver:
    """Saves of one training, one at a time. Make it on all ranks at once, and use it as a context or `close` it.

    `num_writers` processes write for this rank (by default, half of the cores that this rank has, at most 8). They and
    the host's memory (a ring of 1 GiB where the GPU has room for a copy of the state, else the size of the state on
    this rank) are kept for the next save; `host_bytes` says how much it is.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, num_writers: int | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(process_group) if process_group else None
            self._group = dist.new_group(members, backend="gloo")
        else:
            self._group = None
        self._ranks = Ranks(self._group)
        self._plans = SavePlans(self._ranks)
        self._num_writers = num_writers or _usual_num_writers()
        self._memory: HostMemory | None = None
        self._writers: DcpWriters | None = None
        self._stream: torch.cuda.Stream | None = None
        self._clones_fit: bool | None = None
        self._pending: PendingSave | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._prepare(RING_BYTES, pin=True)  # which takes a second

    @property
    def host_bytes(self) -> int:
        """Host memory that is held for staging."""
        return self._memory.bytes.nbytes if self._memory else 0

    @property
    def pending(self) -> PendingSave | None:
        """The save that is not durable yet, or whose error nobody has seen."""
        return self._pending

    def save(
        self,
        state_dict: dict[str, Any],
        target: Place | str,
        *,
        provenance: Provenance | None = None,
        ties: Mapping[str, str] | None = None,
        side_folder: Path | None = None,
        position: DataPosition | Mapping[str, Any] | None = None,
        overwrite: bool = False,
        wait_for_copy: bool = True,
        then: Callable[[], None] | None = None,
    ) -> PendingSave:
        """Take a snapshot of `state_dict` and return. A thread saves it, as `ckptool.save` does of the same arguments.

        Waits for the save before, and raises its error. Without `wait_for_copy` the caller promises not to change a
        tensor of `state_dict` before `wait_until_copied` has returned: on a GPU whose memory can't hold a copy of the
        state, forward and backward passes go on while it travels to the host. `then` is called by the thread of the
        first rank once the checkpoint is durable, and is not to raise: for what a newer checkpoint makes needless.
        """
        began = time.monotonic()
        self.wait()
        template = Template(state_dict)
        snapshot = self._take(template.values)
        work = _Work(
            place(target),
            provenance or bare_provenance(self._ranks.world_size),
            dict(ties or {}),
            side_folder,
            position if isinstance(position, DataPosition) else copy.deepcopy(position),
            overwrite,
            template.paths,
        )
        pending = PendingSave(work.target, snapshot)
        if wait_for_copy:
            snapshot.wait_until_copied()
        self._pending = pending
        threading.Thread(target=self._run, args=(work, snapshot, pending, began, then), name="save").start()
        pending.stall_seconds = time.monotonic() - began
        return pending

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile. For every step of the training."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is on its way any more; raise the error of what was."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last save, and give back memory and processes. Raises that save's error."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The state that was saved is a good one, whatever went wrong since. Other ranks may be gone, so not for ever.
        with contextlib.suppress(CkptoolError, TimeoutError):
            if self._pending is not None:
                self._pending.result(AFTER_ERROR_SECONDS)
        self._release()

    def _take(self, values: Mapping[str, Any]) -> Snapshot:
        """Copy what changes: tensors to where they are safe, plain values by value."""
        shards = [Shard.of(fqn, value) for fqn, value in values.items() if isinstance(value, torch.Tensor)]
        plain = {fqn: copy.deepcopy(value) for fqn, value in values.items() if not isinstance(value, torch.Tensor)}
        device = next((shard.local.device for shard in shards if shard.local.is_cuda), None)
        clones = self._clone(shards, device) if device is not None else {}
        memory = self._prepare(RING_BYTES if clones else state_bytes(shards), pin=device is not None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return Snapshot(
            entries={shard.entry.fqn: shard.entry for shard in shards},
            boxes={shard.entry.fqn: shard.box for shard in shards},
            split=frozenset(shard.entry.fqn for shard in shards if shard.is_split),
            values=plain,
            memory=memory.bytes,
            starts={} if clones else copy_to_host(shards, memory, self._stream),
            clones=clones,
            stream=self._stream,
            copied=self._stream.record_event() if self._stream is not None and not clones else None,
        )

    def _clone(self, shards: Sequence[Shard], device: torch.device) -> dict[str, torch.Tensor]:
        """Clones on the GPU; none when they don't fit. The first save decides: its own clones count as in use later."""
        self._stream = self._stream or torch.cuda.Stream(device)
        if self._clones_fit is None:
            self._clones_fit = fits_on_gpu(state_bytes(shards), device)
        clones = clone_on_gpu(shards) if self._clones_fit else None
        self._clones_fit = clones is not None
        return clones or {}

    def _prepare(self, num_bytes: int, pin: bool) -> HostMemory:
        """Memory and writers, those of the save before unless they are too small."""
        if self._memory is None or self.host_bytes < num_bytes:
            self._release()
            self._memory = HostMemory(num_bytes, pin)
        if self._writers is None and num_bytes > SMALL_BYTES:
            self._writers = DcpWriters(self._memory.shared, self._num_writers)
        return self._memory

    def _run(
        self,
        work: _Work,
        snapshot: Snapshot,
        pending: PendingSave,
        began: float,
        then: Callable[[], None] | None,
    ) -> None:
        try:
            self._write(work, snapshot)
        except BaseException as error:
            if self._writers is not None:
                self._writers.close()  # they may be in the middle of what is not wanted any more
                self._writers = None
            pending._outcome.set_exception(error)
        else:
            pending.durable_seconds = time.monotonic() - began
            if then is not None and self._ranks.rank == 0:
                then()
            pending._outcome.set_result(None)
        finally:
            snapshot.clones.clear()  # the handle may live for long

    def _write(self, work: _Work, snapshot: Snapshot) -> None:
        """What `ckptool.save` does, from a snapshot."""
        ranks, action = self._ranks, f"saving {work.target}"
        check_same_values(ranks, action, lambda: snapshot.not_split(MAX_COMPARED_BYTES))
        description = Description(snapshot.entries, tuple(snapshot.values), work.paths)
        share, plan = self._plans.of(Held(description, snapshot.boxes), action)
        shared = SharedTarget(work.target, work.overwrite, ranks, action)
        try:
            content = shared.content
            ranks.on_first(action, lambda: write_sidecars(content, work.provenance, work.side_folder, work.position))
            written = ranks.agree(action, lambda: self._write_files(content, snapshot, share))
            # As bytes: what thousands of ranks have written is not for the process that trains to take apart.
            records = ranks.gather_on_first(pickle.dumps(written), action)
            ranks.on_first(action, lambda: self._finish(content, cast(Plan, plan), work.ties, records))
            shared.sent({record.file: record.blake3 for record in written})
            shared.publish()
        except BaseException:
            shared.discard()
            raise

    def _finish(self, content: Path, plan: Plan, ties: Mapping[str, str], records: Sequence[bytes]) -> None:
        """Write the metadata, on the first rank."""
        finish = Finish(content, plan.tensors, plan.paths, ties, records)
        if self._writers is not None:
            self._writers.finish(finish)
        else:
            finish.run()

    def _write_files(self, content: Path, snapshot: Snapshot, share: Share) -> list[FileRecord]:
        """This rank's part of the tensors, and of the plain values."""
        memory, writers = cast(HostMemory, self._memory), self._writers
        files = _files_of(snapshot, share.fqns, self._num_writers if writers else 1)
        paths = [content / f"__{self._ranks.rank}_{number}.distcp" for number in range(1, len(files) + 1)]
        loads = _in_turn([loads_of(snapshot, fqns) for fqns in files])
        free: list[int] | None = None
        if snapshot.clones:
            ring = Ring(memory, cast(torch.cuda.Stream, self._stream))
            free = ring.free
            loads = ((number, ring.fill(load, snapshot)) for number, load in loads)
        snapshot.wait_until_copied()
        if writers is not None:
            records = writers.write(paths, snapshot.entries, loads, free)
        else:
            here, view = (load for _, load in loads), memoryview(memory.shared.map)
            records = [write_file(path, snapshot.entries, here, view, free) for path in paths]
        if share.objects:
            file = DcpFile(content / f"__{self._ranks.rank}_0.distcp", {}, BUFFER_BYTES)
            try:
                for fqn in share.objects:
                    file.write_object(fqn, _blob(snapshot.values[fqn]))
            except BaseException:
                file.abandon()
                raise
            records.append(file.close())
        return records

    def _release(self) -> None:
        if self._writers is not None:
            self._writers.close()
        if self._memory is not None:
            self._memory.close()
        self._writers = self._memory = None


def _files_of(snapshot: Snapshot, fqns: Sequence[str], max_files: int) -> list[list[str]]:
    """The tensors that this rank writes, dealt to files of about the same size; no file is empty."""
    sizes_bytes = {fqn: snapshot.boxes[fqn].num_elements * snapshot.entries[fqn].itemsize_bytes for fqn in fqns}
    num_files = max(1, min(max_files, sum(sizes_bytes.values()) // LOAD_BYTES))
    files: list[list[str]] = [[] for _ in range(num_files)]
    filled_bytes = [0] * num_files
    for fqn in sorted(fqns, key=lambda fqn: -sizes_bytes[fqn]):
        smallest = filled_bytes.index(min(filled_bytes))
        files[smallest].append(fqn)
        filled_bytes[smallest] += sizes_bytes[fqn]
    return [file for file in files if file]


def _in_turn(files: Sequence[Iterator[Load]]) -> Iterator[tuple[int, Load]]:
    """The loads of all files, one of each in turn."""
    left = dict(enumerate(files))
    while left:
        for number, loads in list(left.items()):
            load = next(loads, None)
            if load is None:
                del left[number]
            else:
                yield number, load


def _blob(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _usual_num_writers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WRITERS, cores // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


_savers: dict[dist.ProcessGroup | None, AsyncSaver] = {}


def async_save(
    state_dict: dict[str, Any],
    target: Place | str,
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> PendingSave:
    """`AsyncSaver(process_group).save(...)` with a saver that is made at the first call and kept for the next ones.

    It goes on when the program ends, which waits for the last save. Raises the error of the save before.
    """
    saver = _savers.get(process_group)
    if saver is None:
        saver = _savers[process_group] = AsyncSaver(process_group)
        atexit.register(saver.close)
    return saver.save(state_dict, target, **options)
