"""Ranges of stores' files fetched before they are read: neighbours joined, many at a time, into bounded memory.

A store takes tens of milliseconds to begin an answer, so one read after another leaves the network idle. Who reads says
beforehand what it will read, in order (`FetchAhead`), and goes on reading as if nothing had been said: `take` gives a
read the bytes that were fetched for it. What was not announced, or had no room, is read as ever.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType

from ckptool.core.interfaces import RangeStore, StoreRange
from ckptool.storage import buffers

#: Of a longer range a request costs less a byte, but the reader waits longer for its first one.
RANGE_BYTES = 8 << 20

#: Requests at a time: some stores give a connection no more than 50 to 100 MB/s.
NUM_CONNECTIONS = 16

#: Fetching so much for nothing takes less time than another request.
_GAP_BYTES = 256 << 10

#: A rest of so much is no request of its own.
_REST_BYTES = 64 << 10

#: What all ranges of a process may take together.
LIMIT_BYTES = NUM_CONNECTIONS * (RANGE_BYTES + _REST_BYTES)

#: A range counts as so much at least: thousands of small ones would wait for connections all the same.
_LEAST_BYTES = 1 << 20

#: Of so many reads some would have told of ranges in a store.
_MAX_LOCAL_READS = 100


@dataclass(eq=False)
class _Block:
    """A range to fetch as one, with the numbers of the first and the last announced read that want some of it."""

    store: RangeStore
    name: str
    start: int
    end: int
    first_read: int
    last_read: int
    num_copies: int
    memory: mmap.mmap | bytearray | None = None
    done: Future[None] | None = None
    num_readers: int = 0
    is_passed: bool = False

    @property
    def room_bytes(self) -> int:
        num_bytes = RANGE_BYTES + _REST_BYTES if self._is_long else max(self.end - self.start, _LEAST_BYTES)
        return self.num_copies * num_bytes

    @property
    def _is_long(self) -> bool:
        return self.end - self.start > RANGE_BYTES // 2

    def make_room(self) -> None:
        """Buffers are used again, and so all of one size."""
        is_long, num_bytes = self._is_long, self.end - self.start
        self.memory = buffers.take(RANGE_BYTES + _REST_BYTES) if is_long else bytearray(num_bytes)

    def bytes_at(self, start: int, end: int) -> memoryview:
        assert self.memory is not None
        return memoryview(self.memory)[start - self.start : end - self.start]


@dataclass
class _Room:
    """What all series of reads hold together, and who they are."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    limit_bytes: int = LIMIT_BYTES
    #: As many share it at least: who comes next finds room at once.
    num_series: int = 4
    held_bytes: int = 0
    series: list[FetchAhead] = field(default_factory=list)


_room = _Room()


@contextlib.contextmanager
def room(limit_bytes: int, num_series: int) -> Iterator[None]:
    """Let the ranges of so many series take about so much together for the length of the block: as many long ones as
    begin in it."""
    before = _room.limit_bytes, _room.num_series
    each_bytes = RANGE_BYTES + _REST_BYTES
    _room.limit_bytes, _room.num_series = max(2, -(-limit_bytes // each_bytes)) * each_bytes, num_series
    try:
        yield
    finally:
        _room.limit_bytes, _room.num_series = before


class FetchAhead:
    """Fetches what a series of reads will want, in their order: `reads` has the ranges of each (of local files none).

    One thread reads, and says `passed()` after each read. Several series share the memory evenly. What fails is raised
    by the read that wants it.
    """

    def __init__(self, reads: Iterable[Iterable[StoreRange]]) -> None:
        self._blocks = _joined(reads)
        self._next: _Block | None = None
        self._num_passed = 0
        self._is_closed = False
        self.begun: list[_Block] = []

    def __enter__(self) -> FetchAhead:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Begin to fetch."""
        with _room.lock:
            _room.series.append(self)
        self._begin()

    def close(self) -> None:
        """Give up what was begun; what is on its way ends by itself."""
        self._is_closed = True
        with _room.lock:
            if self in _room.series:
                _room.series.remove(self)
            given_up, self.begun = self.begun, []
        for block in given_up:
            assert block.done is not None
            block.done.cancel()
        _leave(given_up)

    def passed(self, num_reads: int | None = None) -> None:
        """One more read is done, or so many are in all."""
        self._num_passed = self._num_passed + 1 if num_reads is None else num_reads
        if not self.begun and self._next is None:
            return
        with _room.lock:
            passed = [block for block in self.begun if block.last_read < self._num_passed]
            self.begun = [block for block in self.begun if block.last_read >= self._num_passed]
        _leave(passed)
        self._begin()

    def _begin(self) -> None:
        """Begin to fetch what there is room for."""
        while (block := self._next or next(self._blocks, None)) is not None:
            self._next = None
            if block.last_read < self._num_passed:
                continue  # there was no room in time
            with _room.lock:
                if not self._has_room(block):
                    self._next = block
                    return
                _room.held_bytes += block.room_bytes
                block.make_room()
                block.done = connections().submit(self._fetch, block)
                self.begun.append(block)
            block.done.add_done_callback(functools.partial(_ended, block))

    def _has_room(self, block: _Block) -> bool:
        own_bytes = sum(other.room_bytes for other in self.begun)
        share_bytes = _room.limit_bytes // max(_room.num_series, len(_room.series))
        is_in_share = not self.begun or own_bytes + block.room_bytes <= share_bytes
        return is_in_share and _room.held_bytes + block.room_bytes <= _room.limit_bytes

    def _fetch(self, block: _Block) -> None:
        block.store.fetch(block.name, block.start, block.bytes_at(block.start, block.end), lambda: self._is_closed)


def take(store: RangeStore, name: str, start: int, out: memoryview) -> int:
    """Fill `out` with a file's bytes from `start` on, as far as they are being fetched; returns how many those are.

    Waits for them, and raises what became of fetching them.
    """
    num_bytes = 0
    while num_bytes < len(out):
        block = _find(store, name, start + num_bytes)
        if block is None or block.done is None:
            break
        try:
            block.done.result()
            first = start + num_bytes
            end = min(block.end, start + len(out))
            out[num_bytes : num_bytes + end - first] = block.bytes_at(first, end)
            num_bytes += end - first
        except CancelledError:
            break  # its series was given up
        finally:
            with _room.lock:
                block.num_readers -= 1
            _release(block)
    return num_bytes


def _find(store: RangeStore, name: str, start: int) -> _Block | None:
    """The range with this byte, held for a reader."""
    with _room.lock:
        for series in _room.series:
            for block in series.begun:
                if block.start <= start < block.end and block.name == name and block.store is store:
                    block.num_readers += 1
                    return block
    return None


def _leave(blocks: Iterable[_Block]) -> None:
    """They are no longer wanted."""
    for block in blocks:
        block.is_passed = True
        _release(block)


def _ended(block: _Block, done: Future[None]) -> None:
    _release(block)


def _release(block: _Block) -> None:
    """Give a range's memory back once nobody fills it, reads it or wants it."""
    with _room.lock:
        is_busy = block.done is None or not block.done.done() or block.num_readers
        if is_busy or not block.is_passed or block.memory is None:
            return
        memory, block.memory = block.memory, None
        _room.held_bytes -= block.room_bytes
    if isinstance(memory, mmap.mmap):
        buffers.give_back(memory)


def _joined(reads: Iterable[Iterable[StoreRange]]) -> Iterator[_Block]:
    """The ranges of all reads in order; neighbours in a file among the next few MB of reads as one.

    When the first reads have none the files are local ones, and no more is looked at.
    """
    some: list[tuple[int, StoreRange]] = []
    num_bytes = 0
    for number, ranges in enumerate(reads):
        if number == _MAX_LOCAL_READS and not some:
            return
        for wanted in ranges:
            if num_bytes + wanted.end - wanted.start > RANGE_BYTES and some:
                blocks, some = list(_join(some)), []
                for block in blocks:
                    if _goes_on_in(block, wanted):
                        some = [(block.first_read, StoreRange(block.store, block.name, block.start, block.end))]
                    else:
                        yield block
                num_bytes = sum(one.end - one.start for _, one in some)
            some.append((number, wanted))
            num_bytes += wanted.end - wanted.start
    yield from _join(some)


def _goes_on_in(block: _Block, wanted: StoreRange) -> bool:
    """Whether a short block goes on in a range."""
    is_short = block.end - block.start < RANGE_BYTES
    is_same = block.store is wanted.store and block.name == wanted.name
    return is_short and is_same and block.start <= wanted.start <= block.end + _GAP_BYTES


def _join(ranges: Iterable[tuple[int, StoreRange]]) -> Iterator[_Block]:
    """Ranges with the numbers of their reads: those that follow each other as one, cut where that is long."""
    blocks: list[_Block] = []
    for number, (store, name, start, end) in sorted(ranges, key=lambda one: (id(one[1].store), *one[1][1:])):
        last = blocks[-1] if blocks else None
        if last and last.store is store and last.name == name and start <= last.end + _GAP_BYTES:
            last.end = max(last.end, end)
            last.first_read, last.last_read = min(last.first_read, number), max(last.last_read, number)
        else:
            blocks.append(_Block(store, name, start, end, number, number, store.num_copies))
    for block in sorted(blocks, key=lambda block: block.first_read):
        while block.end - block.start > RANGE_BYTES + _REST_BYTES:
            yield replace(block, end=block.start + RANGE_BYTES)
            block.start += RANGE_BYTES
        yield block


def slices(ranges: Iterable[StoreRange]) -> Iterator[tuple[StoreRange]]:
    """Long ranges as reads of their own, of RANGE_BYTES each but the last."""
    for store, name, first, last in ranges:
        for start in range(first, last, RANGE_BYTES):
            yield (StoreRange(store, name, start, min(last, start + RANGE_BYTES)),)


@functools.cache
def connections() -> ThreadPoolExecutor:
    """Threads that each wait for an answer."""
    return ThreadPoolExecutor(NUM_CONNECTIONS, "range")


def _begin_anew() -> None:
    """In a forked process, which has none of the threads, nor what they were fetching."""
    _room.lock = threading.Lock()
    _room.held_bytes = 0
    _room.series.clear()
    connections.cache_clear()


os.register_at_fork(after_in_child=_begin_anew)
