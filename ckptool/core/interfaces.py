"""The plug points. Tensor bytes travel as C-contiguous memoryviews, so a format needs no torch to move them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.parts import FileRecord, Part


class RangeStore(Protocol):
    """Where files lie that are read over a network."""

    @property
    def num_copies(self) -> int:
        """How often a range is in memory while it is fetched."""
        ...

    def fetch(self, name: str, offset_bytes: int, out: memoryview, is_given_up: Callable[[], bool]) -> None:
        """Fill `out` with one request, tried again until it is given up."""
        ...


class StoreRange(NamedTuple):
    """The bytes from `start` to before `end` of a file in a store."""

    store: RangeStore
    name: str
    start: int
    end: int


class Source(Protocol):
    """A checkpoint that can be read in pieces, by several threads at once."""

    manifest: Manifest

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` (bytes, `box.num_elements * itemsize` long) with the box's elements in C order.

        Raises DamagedError when the stored bytes are short or inconsistent.
        """
        ...

    def read_object(self, fqn: str) -> bytes:
        """The stored `torch.save` blob of an object entry."""
        ...

    def ranges(self, fqn: str, box: Box) -> Iterable[StoreRange]:
        """What `read_into` will read of files in a store, as far as that is known; of local files nothing.

        Only for reading ahead: raises nothing that `read_into` would not.
        """
        ...

    def close(self) -> None: ...


class PartWriter(Protocol):
    """The files of one part, being written by one thread."""

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        """Store the elements of `piece`, given in C order, a part of the box `chunk` that is stored as one.

        The pieces of a chunk come one after another in the order of its elements, the chunks of a tensor too, and each
        once. `data` is only valid during the call.
        """
        ...

    def write_object(self, fqn: str, data: bytes) -> None:
        """Store a `torch.save` blob."""
        ...

    def close(self) -> list[FileRecord]:
        """Flush the files to the disk."""
        ...

    def abandon(self) -> None:
        """Close them as they are, after an error."""
        ...


class Sink(Protocol):
    """A checkpoint being written into a staging folder, part by part, each by a thread or a process of its own."""

    def open(self, part: Part) -> PartWriter: ...

    def finish(self, records: Sequence[FileRecord]) -> None:
        """Write what describes the contents (index, metadata), last; all bytes are with the operating system after."""
        ...


#: Called after each piece with the number of payload bytes just written, by several threads at once.
Progress = Callable[[int], None]
