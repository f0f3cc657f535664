"""What is announced is fetched in few requests, into bounded memory; what is read is the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from ckptool.core.interfaces import StoreRange
from ckptool.errors import StorageError
from ckptool.storage import fetch_ahead
from ckptool.storage.fetch_ahead import FetchAhead, room, slices, take

KB = 1 << 10
CONTENT = bytes(i * 7 % 251 for i in range(250_000)) * 4


class Memory:
    """A store of files that all have the same content. Notes what it is asked for, and the most that was held then."""

    def __init__(self, wait_s: float = 0.0, broken_at: int = -1, num_copies: int = 1) -> None:
        self.num_copies = num_copies
        self.requests: list[tuple[str, int, int]] = []
        self.most_bytes = 0
        self.num_given_up = 0
        self._wait_s, self._broken_at = wait_s, broken_at

    def fetch(self, name: str, offset_bytes: int, out: memoryview, is_given_up: Callable[[], bool]) -> None:
        self.requests.append((name, offset_bytes, offset_bytes + len(out)))
        self.most_bytes = max(self.most_bytes, fetch_ahead._room.held_bytes)
        time.sleep(self._wait_s)
        if is_given_up():
            self.num_given_up += 1
            raise CancelledError
        if offset_bytes <= self._broken_at < offset_bytes + len(out):
            raise StorageError("broken")
        out[:] = CONTENT[offset_bytes : offset_bytes + len(out)]

    def ranges(self, *ranges: tuple[str, int, int]) -> list[tuple[StoreRange]]:
        return [(StoreRange(self, *one),) for one in ranges]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranges of 100 kB, four of them at most, 1 kB apart at most; nothing is left in memory after."""
    sizes = {"RANGE_BYTES": 100 * KB, "_REST_BYTES": KB, "_GAP_BYTES": KB, "_LEAST_BYTES": KB}
    for name, num_bytes in sizes.items():
        monkeypatch.setattr(fetch_ahead, name, num_bytes)
    with room(4 * 101 * KB, 1):
        yield
    deadline = time.monotonic() + 10
    while fetch_ahead._room.held_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fetch_ahead._room.held_bytes == 0 and fetch_ahead._room.series == []


def read(store: Memory, reads: Iterable[tuple[StoreRange]]) -> int:
    """Announce and read; how many of the bytes had been fetched ahead."""
    reads = list(reads)
    num_bytes = 0
    with FetchAhead(reads) as ahead:
        for ((_, name, start, end),) in reads:
            out = memoryview(bytearray(end - start))
            count = take(store, name, start, out)
            assert out[:count] == CONTENT[start : start + count]
            num_bytes += count
            ahead.passed()
    return num_bytes


def test_neighbours_are_one_request_and_long_ranges_several() -> None:
    store = Memory()
    steps = [("a", i * 10 * KB, (i + 1) * 10 * KB - 100) for i in range(25)]  # with gaps
    assert read(store, store.ranges(*steps, ("b", 50, 60), ("b", 500 * KB, 500 * KB + 1), ("a", 0, 10))) > 200 * KB
    assert sorted(store.requests) == [
        *(("a", 0, 10), ("a", 0, 100 * KB), ("a", 100 * KB, 200 * KB), ("a", 200 * KB, 250 * KB - 100)),
        *(("b", 50, 60), ("b", 500 * KB, 500 * KB + 1)),
    ]


def test_reads_that_go_to_and_fro_between_files_are_joined() -> None:
    store = Memory()
    steps = [(name, i * KB, (i + 1) * KB) for i in range(40) for name in ("a", "b")]
    assert read(store, store.ranges(*steps)) == 80 * KB
    assert sorted(store.requests) == [("a", 0, 40 * KB), ("b", 0, 40 * KB)]


def test_all_of_a_file_in_few_requests() -> None:
    store = Memory()
    assert read(store, slices([StoreRange(store, "a", 0, len(CONTENT))])) == len(CONTENT)
    assert len(store.requests) == -(-len(CONTENT) // (100 * KB))


@pytest.mark.parametrize("num_copies", [1, 2])
def test_several_at_a_time_share_the_memory(num_copies: int) -> None:
    store = Memory(wait_s=0.002, num_copies=num_copies)
    names = [f"file-{i}" for i in range(7)]
    with ThreadPoolExecutor(len(names)) as readers:
        futures = [readers.submit(read, store, slices([StoreRange(store, n, 0, len(CONTENT))])) for n in names]
        assert any([future.result() for future in futures])
    assert 101 * KB < store.most_bytes <= 4 * 101 * KB


def test_what_was_not_announced_is_left_to_the_reader() -> None:
    store = Memory()
    with FetchAhead(store.ranges(("a", 100, 200))):
        out = memoryview(bytearray(50))
        assert take(store, "a", 90, out) == 0 and take(store, "b", 100, out) == 0
        assert take(store, "a", 180, out) == 20 and take(Memory(), "a", 100, out) == 0
    assert take(store, "a", 100, out) == 0


def test_an_error_is_raised_by_the_read_that_wants_the_range() -> None:
    store = Memory(broken_at=150 * KB)
    with FetchAhead(slices([StoreRange(store, "a", 0, len(CONTENT))])) as ahead:
        assert take(store, "a", 0, memoryview(bytearray(100 * KB))) == 100 * KB
        ahead.passed()
        with pytest.raises(StorageError, match="broken"):
            take(store, "a", 100 * KB, memoryview(bytearray(100 * KB)))


def test_what_is_no_longer_wanted_is_given_up() -> None:
    store = Memory(wait_s=0.05)
    with FetchAhead(slices([StoreRange(store, "a", 0, len(CONTENT))])):
        pass
    deadline = time.monotonic() + 10
    while fetch_ahead._room.held_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.num_given_up == len(store.requests) <= 4


def test_a_reader_of_another_series_keeps_a_range_that_was_passed() -> None:
    store = Memory(wait_s=0.05)
    out = memoryview(bytearray(KB))
    with FetchAhead(store.ranges(("a", 0, KB))) as ahead:
        reader = threading.Thread(target=take, args=(store, "a", 0, out))
        reader.start()
        time.sleep(0.02)
        ahead.passed()
        reader.join()
    assert out == CONTENT[:KB]


def test_of_local_files_only_the_first_reads_are_looked_at() -> None:
    looked_at: list[int] = []

    def reads() -> Iterator[tuple[StoreRange, ...]]:
        for number in range(100_000):
            looked_at.append(number)
            yield ()

    with FetchAhead(reads()) as ahead:
        ahead.passed()
    assert len(looked_at) < 1000
