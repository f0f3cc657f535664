"""The plug points. Tensor bytes travel as C-contiguous memoryviews, so a format needs no torch to move them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest


class Source(Protocol):
    """A checkpoint that can be read in pieces."""

    manifest: Manifest

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        """Fill `out` (bytes, `box.num_elements * itemsize` long) with the box's elements in C order.

        Raises DamagedError when the stored bytes are short or inconsistent.
        """
        ...

    def read_object(self, fqn: str) -> bytes:
        """The stored `torch.save` blob of an object entry."""
        ...

    def close(self) -> None: ...


class Sink(Protocol):
    """A checkpoint being written into a staging folder. Boxes of one tensor arrive in ascending order, each once."""

    def write(self, fqn: str, box: Box, data: memoryview) -> None:
        """Store the box's elements, given in C order. `data` is only valid during the call."""
        ...

    def write_object(self, fqn: str, data: bytes) -> None: ...

    def finish(self) -> None:
        """Write what describes the contents (index, metadata), last; all bytes are with the operating system after."""
        ...


#: Called after each piece with the number of payload bytes just written.
Progress = Callable[[int], None]
