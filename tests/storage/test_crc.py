import itertools
import random
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.storage.crc import PiecewiseCrc32, crc32


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(1, 199), max_size=9), st.randoms())
def test_pieces_in_any_order_give_the_checksum_of_the_whole(data: bytes, cuts: list[int], order: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = list(itertools.pairwise(edges))
    order.shuffle(pieces)
    whole = PiecewiseCrc32(len(data))
    results = [whole.add(a, memoryview(data)[a:b]) for a, b in pieces]
    assert results[:-1] == [None] * (len(pieces) - 1)
    assert results[-1] == zlib.crc32(data) == crc32(data)


def test_bytes_read_again_count_as_they_were_read_last() -> None:
    whole = PiecewiseCrc32(6)
    assert whole.add(0, memoryview(b"abX")) is None
    assert whole.add(2, memoryview(b"cd")) is None  # the first run is no longer known
    assert whole.add(4, memoryview(b"ef")) is None
    assert whole.add(0, memoryview(b"ab")) == zlib.crc32(b"abcdef")
