"""Processes that write `.distcp` files from shared memory, and the metadata of all of them: the one that trains never
waits for Python's lock.

Each is a fresh interpreter, not a fork and not a `spawn` of multiprocessing: the first can't follow CUDA, the second
would import the user's script again. It ends when its channel does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import ckptool
from ckptool import errors
from ckptool.core.box import Box
from ckptool.core.collector import no_garbage_collection
from ckptool.core.parts import FileRecord
from ckptool.core.tensors import TensorEntry
from ckptool.errors import CkptoolError, StorageError
from ckptool.formats.dcp_sink import DcpFile, DcpSink
from ckptool.storage.direct_file import BUFFER_BYTES
from ckptool.storage.files import os_errors
from ckptool.storage.shared_memory import SharedMemory, attach

_PROGRAM = "from ckptool.formats.dcp_writers import main; main()"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part `box` of a stored chunk; its elements begin, in C order, `start` bytes into the shared memory."""

    fqn: str
    chunk: Box
    box: Box
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Load:
    """Pieces of one file that are handed over together. `place` (any integer) comes back when they are written."""

    pieces: Sequence[Piece]
    place: int = -1


@dataclass(frozen=True)
class Finish:
    """What becomes `.metadata` and `digests.json`: the state, and lists of FileRecords, pickled, one of each rank.

    A million chunks are a minute's work for Python.
    """

    folder: Path
    tensors: Mapping[str, TensorEntry]
    paths: Mapping[str, tuple[str | int, ...]]
    ties: Mapping[str, str]
    records: Sequence[bytes]

    def run(self) -> None:
        """Raises what `DcpSink.finish` does."""
        with no_garbage_collection():
            records = [record for of_rank in self.records for record in pickle.loads(of_rank)]
            DcpSink(self.folder, self.tensors, self.paths, self.ties).finish(records)


@dataclass(frozen=True)
class _Written:
    place: int


@dataclass(frozen=True)
class _Finished:
    """The metadata is there."""


@dataclass(frozen=True)
class _Failed:
    kind: str
    message: str
    hint: str = ""


@dataclass
class DcpWriters:
    """`num_writers` processes over one shared memory; each writes one file at a time. Use from one thread."""

    memory: SharedMemory
    num_writers: int
    _channels: list[Connection] = field(default_factory=list)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(self.num_writers):
            ours, theirs = Pipe()
            command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(self.memory.fd)]
            top = str(Path(ckptool.__file__).parents[1])
            path = os.pathsep.join(filter(None, [top, os.environ.get("PYTHONPATH", "")]))
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.memory.fd),
                start_new_session=True,
            )
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def write(
        self,
        paths: Sequence[Path],
        tensors: Mapping[str, TensorEntry],
        loads: Iterator[tuple[int, Load]],
        free: list[int] | None = None,
    ) -> list[FileRecord]:
        """Write the files `paths`, at most one a process, of loads that come as (file's number, Load).

        With `free`, a list of places, the place of each written load is put back into it, and the next load is asked
        for only when there is one. Raises the first writer's error, StorageError when a writer died; `close` it then.
        """
        channels = self._channels[: len(paths)]
        for path, channel in zip(paths, channels, strict=True):
            self._send(channel, (path, dict(tensors)))
        while True:
            self._receive(channels, lambda: free is None or bool(free), free)
            number, load = next(loads, (-1, None))
            if load is None:
                break
            self._send(channels[number], load)
        for channel in channels:
            self._send(channel, None)
        records: dict[str, FileRecord] = {}
        self._receive(channels, lambda: len(records) == len(paths), free, records)
        return [records[path.name] for path in paths]

    def finish(self, work: Finish) -> None:
        """Let the first process do it. Raises its error, StorageError when it died; `close` it then."""
        [channel] = self._channels[:1]
        self._send(channel, work)
        finished: dict[str, Any] = {}
        self._receive([channel], lambda: bool(finished), None, finished)

    def _send(self, channel: Connection, message: Any) -> None:
        with contextlib.suppress(OSError):  # a writer that died: its last words, or their absence, are received below
            channel.send(message)

    def _receive(
        self,
        channels: Sequence[Connection],
        is_enough: Callable[[], bool],
        free: list[int] | None,
        records: dict[str, Any] | None = None,
    ) -> None:
        """Take what writers say, at least until `is_enough()`."""
        while ready := wait(channels, None if not is_enough() else 0):
            for channel in ready:
                try:
                    reply: Any = cast(Connection, channel).recv()
                except (EOFError, OSError):
                    raise StorageError("a process that writes the checkpoint has died", "out of memory?") from None
                if isinstance(reply, _Failed):
                    kind = getattr(errors, reply.kind, StorageError)
                    raise kind(reply.message, reply.hint)
                if isinstance(reply, _Written):
                    if free is not None:
                        free.append(reply.place)
                elif records is not None:
                    records["" if isinstance(reply, _Finished) else reply.file] = reply
            if records is not None and is_enough():
                return

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._channels, self._processes = [], []


def write_file(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    loads: Iterable[Load],
    memory: memoryview,
    free: list[int] | None = None,
) -> FileRecord:
    """Write one file of loads that lie in `memory`, in this process; `free` as for `DcpWriters.write`."""
    return _write_file(path, tensors, loads, memory, lambda place: None if free is None else free.append(place))


def _write_file(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    loads: Iterable[Load],
    memory: memoryview,
    written: Callable[[int], None],
) -> FileRecord:
    with os_errors(path):
        file = DcpFile(path, tensors, BUFFER_BYTES)
        try:
            for load in loads:
                for piece in load.pieces:
                    file.write(piece.fqn, piece.chunk, piece.box, memory[piece.start : piece.start + piece.num_bytes])
                written(load.place)
            return file.close()
        except BaseException:
            file.abandon()
            raise


def _serve(channel: Connection, memory: memoryview) -> None:
    """Write one file after another, until the other end is gone."""
    import torch  # noqa: F401 - what the first archive needs, while there is nothing to write yet

    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    try:
        while True:
            request = requests.get()
            if isinstance(request, Finish):
                request.run()
                channel.send(_Finished())
                continue
            path, tensors = request
            loads = iter(requests.get, None)
            channel.send(_write_file(path, tensors, loads, memory, lambda place: channel.send(_Written(place))))
    except CkptoolError as error:
        channel.send(_Failed(type(error).__name__, str(error), error.hint))
    threading.Event().wait()  # after an error there is nothing to do but to be ended


def _listen(channel: Connection, requests: SimpleQueue[Any]) -> None:
    """Read ahead what is asked for. When the other process is gone, this one goes too, in the middle of a write."""
    try:
        while True:
            requests.put(channel.recv())
    except (EOFError, OSError):
        os._exit(1)


def main() -> None:
    """What a writing process does from its start to its end."""
    # Signals are for the process that trains: it says what becomes of its writers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    _serve(Connection(int(sys.argv[1])), attach(int(sys.argv[2])))
