"""Which placement a tensor has, by its name and by its parameter's; where its boxes are stored."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core.box import Box, exact_cover_fault
from ckptool.core.layout import WHOLE_BYTES, Layout, Rule, parameters
from ckptool.core.mesh import Mesh, Replicate, Shard, split
from ckptool.core.rank_files import assign, band, pieces
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, UsageError


def entries(**shapes: tuple[int, ...]) -> dict[str, TensorEntry]:
    return {fqn: TensorEntry(fqn, "float32", shape, ()) for fqn, shape in shapes.items()}


TRAINING = entries(
    **{
        "model.a.weight": (6, 4),
        "model.b.weight": (4, 6),
        "optim.state.a.weight.exp_avg": (6, 4),
        "optim.state.a.weight.step": (),
        "optim.state.a.weight.row_mean": (6,),
        "data.cursor": (8,),
        "other": (WHOLE_BYTES // 4 + 1,),
    }
)


def test_an_optimizers_state_has_the_placements_of_its_parameter() -> None:
    mesh = Mesh.parse("dp_replicate=2,dp_shard=2,tp=3")
    layout = Layout(mesh, [Rule("tp", "a.*", -1), Rule("tp", "b.weight", 0)], TRAINING)
    assert layout.placements == {
        "model.a.weight": (Replicate(), Shard(0), Shard(1)),
        "optim.state.a.weight.exp_avg": (Replicate(), Shard(0), Shard(1)),
        # FSDP2 over a dim that tp cuts too: torch's _StridedShard.
        "model.b.weight": (Replicate(), Shard(0, 3), Shard(0)),
        "optim.state.a.weight.step": (Replicate(),) * 3,
        "optim.state.a.weight.row_mean": (Replicate(),) * 3,
        "data.cursor": (Replicate(),) * 3,
        "other": (Replicate(), Shard(0), Replicate()),
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"app.model.w": (2,), "app.optim.state.w.exp_avg": (2,)}, {"w"}),
        ({"model.model.w": (2,), "optim.state.model.w.exp_avg": (2,)}, {"model.w"}),
        ({"model.w": (2,), "optimizer.state.w.exp_avg": (2,)}, {"w"}),
        ({"w": (2,), "optim.state.w.exp_avg": (2,)}, {"w"}),
        ({"w": (2,), "v": (3,)}, {"w", "v"}),
    ],
)
def test_parameters_are_found_wherever_the_model_is(names: dict[str, tuple[int, ...]], expected: set[str]) -> None:
    found = parameters(entries(**names))
    assert set(found) == set(names) and set(found.values()) == expected


def test_a_whole_name_wins_over_patterns_and_the_first_pattern_over_others() -> None:
    rules = [Rule("tp", "*.weight", 0), Rule("tp", "b.*", None), Rule("tp", "a.weight", 1)]
    layout = Layout(Mesh.parse("tp=2"), rules, TRAINING)
    assert layout.placements["model.a.weight"] == layout.placements["optim.state.a.weight.exp_avg"] == (Shard(1),)
    assert layout.placements["model.b.weight"] == (Shard(0),)


def test_two_axes_for_fsdp_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="mesh axes dp_shard and dp both stand for FSDP"):
        Layout(Mesh.parse("dp_shard=2,dp=2"), [], TRAINING)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ([Rule("tp", "c.*", 0)], MismatchError, r"the tp placement of 'c\.\*' names no parameter"),
        ([Rule("tp", "a.weight", 2)], MismatchError, r"cuts dim 2 of model\.a\.weight, whose shape is \[6, 4\]"),
        ([Rule("tq", "a.weight", 0)], UsageError, "placements for tq, which is no axis of the mesh dp=2,tp=2"),
        ([Rule("dp", "a.weight", 0, 2)], UsageError, r"FSDP cuts dims as wholes, not in parts: a\.weight"),
        ([], UsageError, "nothing says what mesh axis 'tp' cuts"),
    ],
)
def test_rules_that_can_mean_nothing(rules: list[Rule], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Layout(Mesh.parse("dp=2,tp=2"), rules, TRAINING)


def test_everything_is_stored_once_by_a_rank_that_holds_it() -> None:
    mesh = Mesh.parse("dp_replicate=2,dp_shard=3")
    layout = Layout(mesh, [], TRAINING)
    stored = assign(TRAINING.values(), layout, max_chunk_bytes=32, max_band_bytes=32)
    for fqn, entry in TRAINING.items():
        assert exact_cover_fault([box for box, _ in stored[fqn]], entry.shape) == ""
        for box, rank in stored[fqn]:
            holders = [h for h in split(entry.shape, mesh, layout.placements[fqn]) if rank in h.ranks]
            assert any(whole.contains(box) for held in holders for whole in held.boxes)
    loads = [0] * 6
    for fqn in ("model.a.weight", "model.b.weight", "optim.state.a.weight.exp_avg"):
        for box, rank in stored[fqn]:
            loads[rank] += box.num_elements
    assert max(loads) < 0.4 * sum(loads), "one replica stores nearly everything"


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40))
def test_pieces_cover_their_box_and_their_bands_are_small_runs(
    data: st.DataObject, shape: list[int], max_elements: int
) -> None:
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))
    parts = list(pieces(box, tuple(shape), max_elements))
    assert exact_cover_fault([part.local_to(box) for part in parts], box.sizes) == ""
    for part in parts:
        around = band(part, tuple(shape))
        assert around.contains(part) and around.is_contiguous_in(shape)
        assert around.num_elements <= max_elements


@pytest.mark.parametrize(
    ("fqn", "rank"),
    [("rng.rank_3", 3), ("rng.rank00012", 12), ("rank-4.rng", 4), ("lora.rank_dim", None), ("a.ranks3", None)],
)
def test_names_that_say_whose_they_are(fqn: str, rank: int | None) -> None:
    tensors = entries(**{fqn: (4,), "model.blocks.rank_1.weight": (4,)})
    layout = Layout(Mesh.parse("dp=2"), [], tensors)
    assert layout.own_rank(fqn) == rank
    assert layout.own_rank("model.blocks.rank_1.weight") is None
