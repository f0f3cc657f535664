"""Writing processes: files as the sink in this process writes them, places given back, errors as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.core.box import Box
from ckptool.core.tensors import TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_writers import DcpWriters, Load, Piece, write_file
from ckptool.storage.digest import digest_file
from ckptool.storage.shared_memory import SharedMemory

ROWS, ROW_BYTES = 8, 16
TENSORS = {fqn: TensorEntry(fqn, "float32", (ROWS, ROW_BYTES // 4), ()) for fqn in ("a", "b")}


def loads_of(fqn: str, free: list[int] | None = None) -> Iterator[Load]:
    """A tensor row by row, each at a free place, or all at place 0."""
    chunk = Box((0, 0), (ROWS, ROW_BYTES // 4))
    for box in chunk.split_rows(1):
        place = free.pop() if free is not None else 0
        yield Load([Piece(fqn, chunk, box, place * ROW_BYTES, ROW_BYTES)], place)


def in_turn(free: list[int]) -> Iterator[tuple[int, Load]]:
    """A row of the first tensor for the first file, one of the second for the second, and so on."""
    files = [loads_of("a", free), loads_of("b", free)]
    for _ in range(ROWS):
        for number, loads in enumerate(files):
            yield number, next(loads)


def test_two_processes_write_what_one_would_and_reuse_few_places(tmp_path: Path) -> None:
    memory = SharedMemory(2 * ROW_BYTES)
    memory.map[:] = bytes(range(ROW_BYTES)) * 2
    free = [0, 1]
    writers = DcpWriters(memory, 2)
    try:
        records = writers.write([tmp_path / "one", tmp_path / "two"], TENSORS, in_turn(free), free)
    finally:
        writers.close()
    assert sorted(free) == [0, 1]
    view = memoryview(memory.map)
    for record, fqn, name in zip(records, ("a", "b"), ("one", "two"), strict=True):
        (tmp_path / "here").mkdir(exist_ok=True)
        expected = write_file(tmp_path / "here" / name, TENSORS, loads_of(fqn), view)
        # But for the fingerprint that torch.save puts into an archive, which each process makes anew.
        assert (record.chunks, record.digests) == (expected.chunks, expected.digests)
        assert record.num_bytes == (tmp_path / name).stat().st_size == expected.num_bytes
        assert record.blake3 == digest_file(tmp_path / name)


def test_an_error_of_the_disk_comes_as_what_it_is(tmp_path: Path) -> None:
    memory = SharedMemory(ROW_BYTES)
    writers = DcpWriters(memory, 1)
    try:
        with pytest.raises(CkptoolError, match="gone"):
            writers.write([tmp_path / "gone" / "file"], TENSORS, ((0, load) for load in loads_of("a")))
    finally:
        writers.close()
    assert not (tmp_path / "gone").exists()
