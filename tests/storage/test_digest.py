import itertools
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.errors import DamagedError
from ckptool.storage.digest import BLOCK_WORDS, TensorDigest, digest_box, digest_file, digest_run


def test_golden_digests() -> None:
    data = bytes(range(256)) * 4 + b"\x01\x02\x03"
    assert str(digest_run(memoryview(data), 0)) == GOLDEN
    assert str(TensorDigest()) == "0" * 32


GOLDEN = "26ce4298de1a67bdc2fe116c8dc60fc3"


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6), st.integers(0, 3))
def test_parts_add_up_to_the_whole(data: bytes, cuts: list[int], block: int) -> None:
    start = max(0, block * BLOCK_WORDS * 8 - 100) if block else 3
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [digest_run(memoryview(data)[a:b], start + a) for a, b in itertools.pairwise(edges)]
    assert sum(reversed(parts), TensorDigest()) == digest_run(memoryview(data), start)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_every_flipped_bit_changes_both_lanes(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << (bit % 8)
    before, after = (digest_run(memoryview(d), 0).lanes for d in (data, bytes(flipped)))
    assert before[0] != after[0] and before[1] != after[1]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8]), st.data())
def test_boxes_of_any_partition_add_up(shape: tuple[int, ...], itemsize: int, data: st.DataObject) -> None:
    array = np.random.default_rng(0).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = TensorDigest()
    for begin, end in ((0, cut), (cut, shape[dim])):
        if begin < end:
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = begin, end - begin
            part = np.ascontiguousarray(array.take(range(begin, end), axis=dim))
            total += digest_box(part.data, Box(tuple(offsets), tuple(sizes)), shape, itemsize)
    assert total == digest_run(memoryview(array.tobytes()), 0)


def test_large_runs_cross_blocks() -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * BLOCK_WORDS * 8 + 5, dtype=np.uint8)
    whole = digest_run(data.data, 0)
    middle = 2 * BLOCK_WORDS * 8 - 3
    assert digest_run(data[:middle].data, 0) + digest_run(data[middle:].data, middle) == whole


@pytest.mark.parametrize("row_bytes", [4096, 24_000, 3000, 3 << 18])
def test_columns_of_large_tensors_add_up(row_bytes: int) -> None:
    rows = np.random.default_rng(2).integers(0, 256, (2, 3 * BLOCK_WORDS * 8 // row_bytes, row_bytes), dtype=np.uint8)
    total = TensorDigest()
    for begin, end in ((0, 1024), (1024, 1032), (1032, row_bytes)):
        part = np.ascontiguousarray(rows[:, :, begin:end])
        box = Box((0, 0, begin), part.shape)
        total += digest_box(part.data, box, rows.shape, 1)
    assert total == digest_run(rows.reshape(-1).data, 0)


def test_swapped_rows_are_seen() -> None:
    rows = np.random.default_rng(2).integers(0, 1 << 63, (2, BLOCK_WORDS), dtype=np.int64)
    swapped = np.ascontiguousarray(rows[::-1])
    assert digest_run(rows.data.cast("B"), 0) != digest_run(swapped.data.cast("B"), 0)


def test_digests_travel_as_text() -> None:
    digest = digest_run(memoryview(b"hello"), 0)
    assert TensorDigest.parse(str(digest), "here") == digest
    for wrong in ("xyz", 5, "0" * 31):
        with pytest.raises(DamagedError):
            TensorDigest.parse(wrong, "here")


def test_a_files_digest_is_blake3(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc" * 100_000)
    assert digest_file(tmp_path / "f") == blake3(b"abc" * 100_000).hexdigest()
