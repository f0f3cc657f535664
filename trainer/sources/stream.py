"""TokenStream: several files of tokens as one array."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptool import DamagedError

_BLOCK_TOKENS = 1 << 24
_NUM_SAMPLES, _SAMPLE_TOKENS = 64, 1 << 15


@dataclass(frozen=True)
class TokenPart:
    """`num_tokens` items of `dtype` in a file, from byte `offset_bytes` on."""

    path: Path
    dtype: str
    offset_bytes: int
    num_tokens: int

    def open(self) -> np.ndarray:
        """Mapped, not read: shape (num_tokens,). Raises DamagedError when the file is too short."""
        end = self.offset_bytes + self.num_tokens * np.dtype(self.dtype).itemsize
        if self.path.stat().st_size < end:
            raise DamagedError(f"{self.path} should hold {self.num_tokens} tokens", kind="truncated")
        if not self.num_tokens:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset_bytes, (self.num_tokens,))


class TokenStream:
    """The parts one after the other; a slice of it is read from the files that it touches."""

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self._arrays = [part.open() for part in parts]
        self._bounds = np.cumsum([0, *(len(array) for array in self._arrays)])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items `start` to `stop`, as int64 of shape (stop - start,). Raises IndexError outside of the stream."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of a stream of {len(self)}")
        out = np.empty(stop - start, np.int64)
        part = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._bounds[part]), min(stop, int(self._bounds[part + 1]))
            out[len(out) - (stop - start) :][: end - start] = self._arrays[part][start - begin : end - begin]
            start, part = end, part + 1
        return out


def blocks(stream: TokenStream) -> Iterator[tuple[int, np.ndarray]]:
    """The stream in large pieces, each with the place of its first item."""
    for start in range(0, len(stream), _BLOCK_TOKENS):
        yield start, stream.read(start, min(start + _BLOCK_TOKENS, len(stream)))


def content_digest(stream: TokenStream) -> str:
    """Over the values as little-endian uint32: the same tokens in another dtype or other files are the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for _, block in blocks(stream):
        digest.update(block.astype("<u4").tobytes())
    return digest.hexdigest()


def max_token(stream: TokenStream) -> int:
    """The largest token; -1 of an empty stream."""
    return max((int(block.max()) for _, block in blocks(stream)), default=-1)


def sample_digest(stream: TokenStream) -> str:
    """Of stretches spread over the stream, both ends among them: whether a disk gives back what was written can be told
    by it at any size in an instant, but for small damage between them."""
    last = max(0, len(stream) - _SAMPLE_TOKENS)
    starts = sorted({last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)})
    digest = hashlib.blake2b(digest_size=16)
    for start in starts:
        digest.update(stream.read(start, min(start + _SAMPLE_TOKENS, len(stream))).tobytes())
    return digest.hexdigest()
