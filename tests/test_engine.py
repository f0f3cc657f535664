from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ckptool import engine
from ckptool.core.box import Box
from ckptool.core.budget import MemoryBudget
from ckptool.core.parts import Part, PlanItem
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError, MismatchError
from tests.memory_sink import MemorySink, MemorySource


def entry(fqn: str, tensor: torch.Tensor) -> TensorEntry:
    shape = tuple(tensor.shape)
    return TensorEntry(fqn, str(tensor.dtype).removeprefix("torch."), shape, (Chunk(Box.whole(shape)),))


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    return [Part((fqn,), (PlanItem((fqn,), (entry(fqn, tensor),)),)) for fqn, tensor in tensors.items()]


def test_any_number_of_workers_writes_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.core.plan.PIECE_BYTES", 64)
    tensors = {f"t{i}": torch.randn(i, 7) for i in range(9)} | {"scalar": torch.tensor(3)}
    for num_workers in (1, 4):
        sink = MemorySink([entry(fqn, tensor) for fqn, tensor in tensors.items()])
        written = []
        engine.run(parts_of(tensors), MemorySource(tensors), sink, written.append, num_workers=num_workers)
        assert sum(written) == sum(tensor.nbytes for tensor in tensors.values())
        for fqn, tensor in tensors.items():
            assert torch.equal(sink.tensors[fqn], tensor) and bool((sink.written[fqn] == 1).all())


class BreakingSource(MemorySource):
    def read_into(self, fqn: str, box: Box, out: memoryview) -> None:
        if fqn == "bad":
            raise DamagedError("bad is damaged")
        super().read_into(fqn, box, out)


class AbandonedSink(MemorySink):
    def __init__(self, targets: list[TensorEntry]) -> None:
        super().__init__(targets)
        self.num_abandoned = 0

    def abandon(self) -> None:
        self.num_abandoned += 1


def test_the_first_error_ends_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptool.core.plan.PIECE_BYTES", 16)
    tensors = {"bad": torch.ones(3), **{f"t{i}": torch.ones(4000) for i in range(50)}}
    sink = AbandonedSink([entry(fqn, tensor) for fqn, tensor in tensors.items()])
    with pytest.raises(DamagedError, match="bad is damaged"):
        engine.run(parts_of(tensors), BreakingSource(tensors), sink, num_workers=3)
    assert sink.num_abandoned >= 1
    assert sum(bool((written == 1).all()) for written in sink.written.values()) < 51
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("part", "read"))]


def test_groups_share_the_budget() -> None:
    running, most, lock = 0, 0, threading.Lock()
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(6)}

    def doubled(group: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        made = {fqn: tensor * 2 for fqn, tensor in group.items()}
        with lock:
            running -= 1
        return made

    parts = [Part((f,), (PlanItem((f,), (entry(f, t),), doubled),)) for f, t in tensors.items()]
    sink = MemorySink([entry(fqn, tensor) for fqn, tensor in tensors.items()])
    engine.run(parts, MemorySource(tensors), sink, num_workers=6, budget=MemoryBudget(32 * 3))
    assert most == 1
    assert all(torch.equal(sink.tensors[fqn], tensor * 2) for fqn, tensor in tensors.items())


def test_a_transform_that_makes_something_else_is_refused() -> None:
    tensors = {"t": torch.ones(4)}
    part = Part(("t",), (PlanItem(("t",), (entry("t", tensors["t"]),), lambda group: {"t": group["t"][:2]}),))
    with pytest.raises(MismatchError, match="did not make what was planned"):
        engine.run([part], MemorySource(tensors), AbandonedSink([entry("t", tensors["t"])]))


def test_a_one_element_tensor_of_any_stride_is_written() -> None:
    strided = torch.arange(12.0).reshape(4, 3)[1:2, 1:2]
    part = Part(("t",), (PlanItem(("t",), (entry("t", strided),), lambda group: {"t": strided}),))
    sink = MemorySink([entry("t", strided)])
    engine.run([part], MemorySource({"t": strided}), sink)
    assert sink.tensors["t"].item() == 4.0
