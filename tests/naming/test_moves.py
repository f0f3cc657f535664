"""Which transforms only move elements, and where to: against what torch makes of real values."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckptool import engine
from ckptool.core.box import Box
from ckptool.core.cuts import cut_tensor, stream_tensor
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.formats.hf_folder import HfSource
from ckptool.naming.meta_model import build_meta_model
from ckptool.naming.moves import find_moves
from ckptool.naming.transformers_names import plan_export, plan_import
from ckptool.planner import FILE_BUFFER_BYTES, plan_conversion
from tests.memory_sink import MemorySink, MemorySource
from tests.naming.test_transformers_names import assert_equal, record
from tests.tiny_models import SIZES


def entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), (Chunk(Box.whole(t.shape)),))
        for name, t in tensors.items()
    }


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]


def check(transform: Callable[[Mapping[str, Any]], Mapping[str, Any]], sources: Mapping[str, torch.Tensor]) -> None:
    """What the moves make is, element by element, what the transform makes."""
    moves = find_moves(transform, entries(sources))
    assert moves is not None
    for name, tensor in transform(sources).items():
        made = torch.full_like(tensor, -1)
        for move in moves[name]:
            cut(made, move.box).copy_(cut(sources[move.source], move.source_box).reshape(move.box.sizes))
        assert torch.equal(made, tensor), name


#: What may be done to a list of tensors of one shape, by a number that chooses how.
STEPS: list[Callable[[list[torch.Tensor], int], list[torch.Tensor]]] = [
    lambda tensors, n: [torch.stack(tensors, dim=n % (tensors[0].dim() + 1))],
    lambda tensors, n: [torch.cat(tensors, dim=n % tensors[0].dim())],
    lambda tensors, n: [part for t in tensors for part in t.chunk(2, dim=n % t.dim())],
    lambda tensors, n: [part for t in tensors for part in t.unbind(n % t.dim())] if tensors[0].dim() > 1 else tensors,
    lambda tensors, n: [t.unsqueeze(n % (t.dim() + 1)) for t in tensors],
    lambda tensors, n: [t.squeeze() for t in tensors] if tensors[0].squeeze().dim() else tensors,
    lambda tensors, n: [t.narrow(n % t.dim(), 0, (t.shape[n % t.dim()] + 1) // 2).contiguous() for t in tensors],
    lambda tensors, n: [t[n % len(t)] for t in tensors] if tensors[0].dim() > 1 else tensors,
    lambda tensors, n: tensors[::-1],
]


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 5)), max_size=4),
)
def test_any_chain_of_stacking_and_cutting_is_followed(num: int, shape: list[int], steps: list) -> None:
    first = torch.arange(num * torch.Size(shape).numel()).view(num, *shape)

    def transform(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = list(tensors.values())
        for step, number in steps:
            if len({tensor.shape for tensor in made}) == 1:
                made = STEPS[step](made, number)
        return {f"t{i}": tensor for i, tensor in enumerate(made)}

    check(transform, {f"s{i}": tensor for i, tensor in enumerate(first)})


@pytest.mark.parametrize(
    "transform",
    [
        lambda t: {"t": t["s"].T},
        lambda t: {"t": t["s"] * 1},
        lambda t: {"t": t["s"].flip([0])},
        lambda t: {"t": t["s"][::2]},
        lambda t: {"t": t["s"].view(3, 4)},
        lambda t: {"t": t["s"].bfloat16().float()},
        lambda t: {"t": t["s"].add_(1)},
        lambda t: {"t": t["s"], "u": t["s"][0].zero_()},
        lambda t: {"t": t["s"], "zeros": t["s"].new_zeros(4)},
        lambda t: {"t": torch.tensor(t["s"].tolist())},
        lambda t: {"t": t["s"].index_select(0, torch.tensor([2, 0, 1], device=t["s"].device))},
    ],
)
def test_what_computes_or_reorders_is_not(transform: Callable[[Any], Any]) -> None:
    assert find_moves(transform, entries({"s": torch.arange(12.0).view(4, 3)})) is None


def experts() -> Any:
    """64 experts in one layer: 23 MB that are two tensors live and 192 on the Hub."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        **{**SIZES, "hidden_size": 192, "num_hidden_layers": 1, "intermediate_size": 320}, num_local_experts=64
    )
    model: Any = transformers.MixtralForCausalLM(config)
    return model.to(torch.bfloat16)


def run_counted(plan: Any, source: Any, sink: Any) -> int:
    """Convert, and return the most bytes that the engine's buffers took."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        engine.run(plan.parts, source, sink)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


class Discard(MemorySink):
    """Counts what comes, and keeps nothing: the buffers alone are in memory."""

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        self.written[fqn][tuple(slice(o, e) for o, e in zip(piece.offsets, piece.ends, strict=True))] += 1


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_fused_experts_take_the_memory_of_a_few_pieces(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = experts()
    model.save_pretrained(tmp_path)
    for name in ("core.plan.PIECE_BYTES", "engine.BATCH_BYTES", "planner.BATCH_BYTES"):
        monkeypatch.setattr(f"ckptool.{name}", 1 << 16)
    source = HfSource(tmp_path)
    names = plan_import(build_meta_model(tmp_path, dtype), source.manifest.tensors, dtype, lambda a, b: False)
    plan = plan_conversion("import", source.manifest, names, "memory", cut=cut_tensor, piece_bytes=1 << 20)
    assert any(group.transform for group in names.groups) and not any(item.transform for item in plan.items)
    assert plan.to_json()["num_transformed"] == 2
    bound = plan.peak_bytes - plan.num_workers * FILE_BUFFER_BYTES
    assert bound <= 6 * (1 << 16) * plan.num_workers
    sink = MemorySink([entry for item in plan.items for entry in item.targets])
    engine.run(plan.parts, source, sink)
    assert all((count == 1).all() for count in sink.written.values())
    wanted = getattr(torch, dtype or "bfloat16")
    assert_equal(sink.tensors, {name: tensor.to(wanted) for name, tensor in model.state_dict().items()})
    counting = Discard([entry for item in plan.items for entry in item.targets])
    assert run_counted(plan, source, counting) < bound + (1 << 20)

    live = MemorySource(sink.tensors)
    back = plan_export(build_meta_model(tmp_path, dtype), live.manifest.tensors, record(names), None)
    plan = plan_conversion("export", live.manifest, back, "memory", cut=stream_tensor, piece_bytes=1 << 20)
    assert not any(item.transform for item in plan.items)
    assert plan.read_bytes == plan.write_bytes == sum(t.nbytes for t in sink.tensors.values())
    out = MemorySink([entry for item in plan.items for entry in item.targets])
    engine.run(plan.parts, live, out)
    assert all((count == 1).all() for count in out.written.values())
    assert_equal(out.tensors, {n: t.to(wanted) for n, t in load_file(tmp_path / "model.safetensors").items()})
