"""Pieces come in order, errors in their turn, and nobody is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptool.storage.read_ahead import PIECE_BYTES, read_ahead


def reader(content: bytes, fails_at: int | None = None) -> Callable[[memoryview], int]:
    """Reads `content`, a little less than it is asked for; from the byte `fails_at` on the disk is broken."""
    position = 0

    def read(buffer: memoryview) -> int:
        nonlocal position
        if fails_at is not None and position >= fails_at:
            raise OSError("broken")
        part = content[position : position + max(1, len(buffer) - 3)]
        buffer[: len(part)] = part
        position += len(part)
        return len(part)

    return read


def threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


CONTENT = bytes(i * 7 % 251 for i in range(40_000)) * 200


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, 4 * PIECE_BYTES + 1, len(CONTENT)])
def test_all_bytes_in_order(num_bytes: int) -> None:
    content = CONTENT[:num_bytes]
    assert b"".join(bytes(piece) for piece in read_ahead(reader(content), num_bytes)) == content
    assert threads() == 0


@pytest.mark.parametrize("num_bytes", [100, len(CONTENT)])
def test_more_or_fewer_bytes_than_expected(num_bytes: int) -> None:
    for content in (CONTENT[:1000], CONTENT):
        assert b"".join(bytes(piece) for piece in read_ahead(reader(content), num_bytes)) == content


def test_an_error_comes_after_the_pieces_before_it() -> None:
    pieces = read_ahead(reader(CONTENT, fails_at=3_000_000), len(CONTENT))
    num_bytes = 0
    with pytest.raises(OSError, match="broken"):
        for piece in pieces:
            num_bytes += len(piece)
    assert num_bytes >= 3_000_000
    assert threads() == 0


def test_who_stops_early_leaves_no_thread() -> None:
    pieces = read_ahead(reader(CONTENT), len(CONTENT))
    assert bytes(next(pieces)[:10]) == CONTENT[:10]
    pieces.close()  # type: ignore[attr-defined]
    assert threads() == 0
