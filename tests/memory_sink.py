"""A Sink and a Source that keep tensors in memory: the real interfaces, without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.interfaces import StoreRange
from ckptool.core.parts import FileRecord, Part
from ckptool.core.tensors import Chunk, TensorEntry


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))


class MemorySink:
    """Collects written boxes into whole tensors and counts how often each element was written."""

    def __init__(self, targets: list[TensorEntry]) -> None:
        self.tensors = {e.fqn: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for e in targets}
        self.written = {e.fqn: torch.zeros(e.shape, dtype=torch.int32) for e in targets}
        self.finished = False

    def open(self, part: Part) -> MemorySink:
        return self

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        assert chunk.contains(piece)
        target = self.tensors[fqn][_slices(piece)]
        if len(data):
            target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype).view(piece.sizes))
        self.written[fqn][_slices(piece)] += 1

    def write_object(self, fqn: str, data: bytes) -> None:
        raise AssertionError(f"no objects expected, got {fqn}")

    def close(self) -> list[FileRecord]:
        return [FileRecord("memory", 0, "")]

    def abandon(self) -> None:
        raise AssertionError("no error expected")

    def finish(self, records: Sequence[FileRecord]) -> None:
        self.finished = True


class MemorySource:
    """Serves given tensors box by box."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        entries = {}
        for fqn, tensor in tensors.items():
            shape = tuple(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[fqn] = TensorEntry(fqn, dtype, shape, (Chunk(Box.whole(shape)),))
        self.manifest = Manifest("memory", entries)

    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        piece = self._tensors[fqn][_slices(box)].contiguous().view(-1)
        if piece.numel():
            torch.frombuffer(out, dtype=torch.uint8).copy_(piece.view(torch.uint8))

    def ranges(self, fqn: str, box: Box) -> tuple[StoreRange, ...]:
        return ()

    def read_object(self, fqn: str) -> bytes:
        raise AssertionError(f"no objects expected, got {fqn}")

    def close(self) -> None:
        pass
