"""The split of a tensor over a mesh equals DTensor's, on thousands of shapes, meshes and placements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, split
from ckptool.errors import UsageError

AXES = ("a", "b", "c")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 23), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    shards = st.builds(Shard, dims, st.sampled_from([1, 1, 2, 3, 5]))
    placements = tuple(draw(st.one_of(st.just(Replicate()), shards)) for _ in sizes)
    return shape, Mesh(AXES[: len(sizes)], sizes), placements


def indices_by_torch(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> list[set[int]]:
    """Each rank's elements, as numbers in the flattened tensor, by torch's own splitting of real tensors."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    held = []
    for position in itertools.product(*map(range, mesh.sizes)):
        part = whole
        for placement, size, index in zip(placements, mesh.sizes, position, strict=True):
            if isinstance(placement, Shard):
                part = as_torch(placement)._split_tensor(part, size, with_padding=False)[0][index]  # type: ignore[union-attr]
        held.append(set(part.reshape(-1).tolist()))
    return held


def as_torch(placement: Placement) -> TorchReplicate | TorchShard | _StridedShard:
    if isinstance(placement, Replicate):
        return TorchReplicate()
    if placement.num_parts == 1:
        return TorchShard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.num_parts)


def boxes_by_rank(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> list[tuple[Box, ...]]:
    boxes: list[tuple[Box, ...]] = [()] * mesh.world_size
    for held in split(shape, mesh, placements):
        for rank in held.ranks:
            assert boxes[rank] == ()
            boxes[rank] = held.boxes
    return boxes


Case = tuple[tuple[int, ...], Mesh, tuple[Placement, ...]]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_rank_holds_what_dtensor_gives_it(case: Case) -> None:
    check_split(*case)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(cases())
def test_every_rank_holds_what_dtensor_gives_it_in_thousands_of_cases(case: Case) -> None:
    check_split(*case)


def check_split(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    torch_placements = [as_torch(placement) for placement in placements]
    elements = indices_by_torch(shape, mesh, placements)
    by_rank = boxes_by_rank(shape, mesh, placements)
    for position, boxes, expected in zip(itertools.product(*map(range, mesh.sizes)), by_rank, elements, strict=True):
        parts = [whole[tuple(slice(a, b) for a, b in zip(x.offsets, x.ends, strict=True))] for x in boxes]
        found = [i for part in parts for i in part.reshape(-1).tolist()]
        assert len(found) == len(expected) and set(found) == expected
        # What dcp.load asks for: it knows one box a rank, which is all of it unless there are several.
        local, offset = _compute_local_shape_and_global_offset(shape, mesh.sizes, list(position), torch_placements)
        assert len(found) == math.prod(local)
        if len(boxes) == 1:
            assert (boxes[0].sizes, boxes[0].offsets) == (tuple(local), tuple(offset))
    boxes = [box for held in split(shape, mesh, placements) for box in held.boxes]
    assert exact_cover_fault(boxes, shape) == ""


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 8))
def test_fsdp_over_a_tensor_parallel_dim_gives_each_tp_rank_its_own_rows(rows: int, fsdp: int, tp: int) -> None:
    even = rows - rows % (fsdp * tp)
    mesh = Mesh(("dp_shard", "tp"), (fsdp, tp))
    for rank, boxes in enumerate(boxes_by_rank((even, 3), mesh, (Shard(0, tp), Shard(0)))):
        rows_of_tp, rows_of_rank = even // tp, even // (fsdp * tp)
        first = (rank % tp) * rows_of_tp + (rank // tp) * rows_of_rank
        assert boxes == ((Box((first, 0), (rows_of_rank, 3)),) if even else ())


def test_replicas_hold_the_same_boxes() -> None:
    mesh = Mesh.parse("dp_replicate=2, dp_shard=3")
    held = split((7,), mesh, (Replicate(), Shard(0)))
    assert [(h.boxes[0].offsets, h.boxes[0].sizes, h.ranks) for h in held] == [
        ((0,), (3,), (0, 3)),
        ((3,), (3,), (1, 4)),
        ((6,), (1,), (2, 5)),
    ]


def test_scalars_are_on_every_rank() -> None:
    (held,) = split((), Mesh(("dp",), (4,)), (Replicate(),))
    assert held.boxes == (Box((), ()),) and held.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=0", "has 0 ranks"),
        ("dp=999999", "has 999999 ranks"),
        ("dp=4,dp=2", "two axes named 'dp'"),
        ("4", "'4' is no mesh axis"),
        ("", "'' is no mesh axis"),
        ("dp=-2", "'dp=-2' is no mesh axis"),
    ],
)
def test_what_is_no_mesh(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mesh.parse(text)


def test_a_mesh_reads_its_own_text() -> None:
    mesh = Mesh.parse("dp_replicate=2,dp_shard=4,tp=2")
    assert mesh.world_size == 16
    assert Mesh.parse(str(mesh)) == mesh == Mesh.of(mesh.to_json())
