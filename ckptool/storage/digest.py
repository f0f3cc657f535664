"""Digests of tensors that don't depend on how they are stored, and of files.

A tensor's digest must come out the same from one process, from 64 ranks that each hold some rows, and from a GPU that
never shows its bytes to the CPU. A hash of a byte stream can't do that; a sum can. With the tensor's elements in C
order as little-endian bytes, zero-padded to 64-bit words w_0, w_1, ..., lane l of the digest is

    D_l = sum over k of  w_k * P_l(k >> 16) * Q_l(k & 0xFFFF)   modulo 2**64

where P and Q are odd 64-bit numbers drawn from BLAKE3. Any part of the tensor gives its own sum, in any order, and the
sums add up. An odd factor loses no bit, so a change within one word always changes both lanes; any other accidental
change goes unseen with probability of about 2**-128. It is no defence against a forger: files have BLAKE3 for that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptool.core.box import Box
from ckptool.errors import DamagedError
from ckptool.storage.files import Place, fresh_handle, open_binary, os_errors
from ckptool.storage.read_ahead import read_ahead

if TYPE_CHECKING:
    import numpy as np

ALGORITHM = "sum64x2"
WORD_BYTES = 8
BLOCK_WORDS = 1 << 16
_LANES = 2
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The two lanes. Digests of disjoint parts of one tensor add up to the digest of their union."""

    lanes: tuple[int, int] = (0, 0)

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest(((self.lanes[0] + other.lanes[0]) & _MASK, (self.lanes[1] + other.lanes[1]) & _MASK))

    def __str__(self) -> str:
        return f"{self.lanes[0]:016x}{self.lanes[1]:016x}"

    @classmethod
    def parse(cls, text: Any, location: str) -> TensorDigest:
        """Read `str(digest)` back. Raises DamagedError when it isn't one."""
        if not isinstance(text, str) or len(text) != 32 or not set(text) <= set("0123456789abcdef"):
            raise DamagedError(f"{location}: not a tensor digest: {text!r}")
        return cls((int(text[:16], 16), int(text[16:], 16)))


def digest_run(data: memoryview, start_bytes: int) -> TensorDigest:
    """The sum over a contiguous run of a tensor's bytes that begins at `start_bytes` of the flattened tensor."""
    import numpy as np

    if not data:
        return TensorDigest()
    lanes = [0] * _LANES
    first_word, lead = divmod(start_bytes, WORD_BYTES)
    body = memoryview(data).cast("B")
    if lead:
        head, body = body[: WORD_BYTES - lead], body[WORD_BYTES - lead :]
        _add_word(lanes, first_word, int.from_bytes(head, "little") << (8 * lead))
        first_word += 1
    num_words, tail_bytes = divmod(len(body), WORD_BYTES)
    if tail_bytes:
        tail = body[num_words * WORD_BYTES :]
        _add_word(lanes, first_word + num_words, int.from_bytes(tail, "little"))
    words = np.frombuffer(body[: num_words * WORD_BYTES], dtype="<u8")
    for first_block, column, rows in _blocks(first_word, words):
        for lane in range(_LANES):
            # One call over many blocks: other threads run meanwhile, and einsum is numpy's quickest sum of products.
            sums = np.einsum("ij,j->i", rows, inner_factors(lane)[column : column + rows.shape[1]]).tolist()
            total = sum(inner * outer_factor(lane, first_block + i) for i, inner in enumerate(sums))
            lanes[lane] = (lanes[lane] + total) & _MASK
    return TensorDigest((lanes[0], lanes[1]))


def digest_box(data: memoryview, box: Box, shape: tuple[int, ...], itemsize_bytes: int) -> TensorDigest:
    """The sum over a box of a tensor of `shape`; `data` holds the box's elements in C order."""
    data = memoryview(data).cast("B")
    if not data:
        return TensorDigest()
    if box.is_contiguous_in(shape):
        return digest_run(data, box.flat_start(shape) * itemsize_bytes)
    split = max(d for d, (size, n) in enumerate(zip(box.sizes, shape, strict=True)) if size != n)
    stride_bytes = math.prod(shape[split:]) * itemsize_bytes
    rows_bytes = math.prod(box.sizes[split - 1 :]) * itemsize_bytes
    total = TensorDigest()
    outer = (range(start, end) for start, end in zip(box.offsets[: split - 1], box.ends[: split - 1], strict=True))
    for number, indices in enumerate(itertools.product(*outer)):
        first = Box((*indices, *box.offsets[split - 1 :]), box.sizes).flat_start(shape) * itemsize_bytes
        rows = data[number * rows_bytes : (number + 1) * rows_bytes]
        total += _digest_rows(rows, first, stride_bytes, box.sizes[split - 1])
    return total


def _digest_rows(data: memoryview, start_bytes: int, stride_bytes: int, num_rows: int) -> TensorDigest:
    """The sum over runs of one length, the first at `start_bytes` of the tensor, each `stride_bytes` after the last."""
    import numpy as np

    run_bytes = len(data) // num_rows
    if any(num_bytes % WORD_BYTES for num_bytes in (start_bytes, stride_bytes, run_bytes)):
        runs = (data[row * run_bytes : (row + 1) * run_bytes] for row in range(num_rows))
        parts = (digest_run(run, start_bytes + row * stride_bytes) for row, run in enumerate(runs))
        return functools.reduce(TensorDigest.__add__, parts, TensorDigest())
    stride, num_words = stride_bytes // WORD_BYTES, run_bytes // WORD_BYTES
    words = np.frombuffer(data, dtype="<u8").reshape(num_rows, num_words)
    total = TensorDigest()
    row = 0
    while row < num_rows:
        block, column = divmod(start_bytes // WORD_BYTES + row * stride, BLOCK_WORDS)
        # Rows that lie within the block: their factors lie in the table as they do in the tensor.
        count = min(num_rows - row, (BLOCK_WORDS - num_words - column) // stride + 1)
        if count < 1:
            count = 1
            total += digest_run(memoryview(words[row]), start_bytes + row * stride_bytes)
        else:
            lanes = [_sum_products(lane, block, column, words[row : row + count], stride) for lane in range(_LANES)]
            total += TensorDigest((lanes[0], lanes[1]))
        row += count
    return total


def _sum_products(lane: int, block: int, column: int, words: np.ndarray, stride: int) -> int:
    """The lane's sum over rows of words within one block, from `column` on and `stride` words apart."""
    import numpy as np

    factors = np.lib.stride_tricks.as_strided(
        inner_factors(lane)[column:], words.shape, (stride * WORD_BYTES, WORD_BYTES), writeable=False
    )
    return sum(np.einsum("ij,ij->i", words, factors).tolist()) * outer_factor(lane, block) & _MASK


def digest_file(path: Place, report: Callable[[int], None] | None = None) -> str:
    """BLAKE3 of a file's bytes, in hex. `report` is called with the number of bytes of each piece."""

    def read() -> str:
        hasher = blake3()
        with open_binary(path, in_order=True) as opened:
            file: Any = opened
            for piece in read_ahead(lambda buffer: file.readinto(buffer) or 0, path.stat().st_size):
                hasher.update(piece)
                if report:
                    report(len(piece))
        return hasher.hexdigest()

    with os_errors(path):
        return fresh_handle(read)


@functools.cache
def inner_factors(lane: int) -> np.ndarray:
    """Q_lane: BLOCK_WORDS odd 64-bit numbers, little-endian from BLAKE3's output stream."""
    import numpy as np

    stream = blake3(f"ckptool {ALGORITHM} inner {lane}".encode()).digest(length=BLOCK_WORDS * WORD_BYTES)
    return np.frombuffer(stream, dtype="<u8") | np.uint64(1)


@functools.lru_cache(maxsize=1 << 16)
def outer_factor(lane: int, block: int) -> int:
    """P_lane(block): an odd 64-bit number."""
    return int.from_bytes(blake3(f"ckptool {ALGORITHM} outer {lane} {block}".encode()).digest(length=8), "little") | 1


def _blocks(first_word: int, words: np.ndarray) -> Iterable[tuple[int, int, np.ndarray]]:
    """Cut the words at block borders, whole blocks together: (first block's number, column of the first word in it, the
    words as a matrix with one row a block)."""
    done = 0
    while done < len(words):
        block, column = divmod(first_word + done, BLOCK_WORDS)
        left = len(words) - done
        if column or left < BLOCK_WORDS:
            num_rows, num_columns = 1, min(BLOCK_WORDS - column, left)
        else:
            num_rows, num_columns = left // BLOCK_WORDS, BLOCK_WORDS
        count = num_rows * num_columns
        yield block, column, words[done : done + count].reshape(num_rows, num_columns)
        done += count


def _add_word(lanes: list[int], position: int, word: int) -> None:
    block, column = divmod(position, BLOCK_WORDS)
    for lane in range(_LANES):
        factor = int(inner_factors(lane)[column]) * outer_factor(lane, block)
        lanes[lane] = (lanes[lane] + word * factor) & _MASK
