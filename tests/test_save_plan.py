"""Who writes what: all ranks alike, some that differ, and how little is told when the state is still the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptool
from ckptool.core.box import Box
from ckptool.core.tensors import TensorEntry
from ckptool.ranks import Ranks
from ckptool.save_plan import Description, Held, plan_saves
from tests.spawn import run_ranks


def described(names: str, *objects: str) -> Description:
    entries = {name: TensorEntry(name, "float32", (10, 10), ()) for name in names}
    return Description(entries, objects, {name: (name,) for name in (*names, *objects)})


def test_what_all_hold_is_shared_out_among_them() -> None:
    held = Held(described("abcd", "step"), {name: Box.whole((10, 10)) for name in "abcd"})
    plan = plan_saves([held, held])
    assert [len(share.fqns) for share in plan.shares] == [2, 2]
    assert sorted(name for share in plan.shares for name in share.fqns) == list("abcd")
    assert [share.objects for share in plan.shares] == [("step",), ()]


def test_every_shard_is_written_by_one_who_holds_it_and_names_may_differ() -> None:
    halves = [Box((0, 0), (5, 10)), Box((5, 0), (5, 10))]
    ranks = [
        Held(described("ab", "seen"), {"a": halves[0], "b": Box.whole((10, 10))}),
        Held(described("ab"), {"a": halves[1], "b": Box.whole((10, 10))}),
        Held(described("c", "seen", "mine"), {"c": Box.whole((10, 10))}),
    ]
    plan = plan_saves(ranks)
    assert "a" in plan.shares[0].fqns and "a" in plan.shares[1].fqns
    assert sum("b" in share.fqns for share in plan.shares) == 1
    assert plan.shares[2].fqns == ("c",)
    assert [share.objects for share in plan.shares] == [("seen",), (), ("mine",)]
    assert set(plan.tensors) == set("abc")
    assert set(plan.paths) == {"a", "b", "c", "seen", "mine"}


def test_empty_shards_are_written_only_of_empty_tensors() -> None:
    entries = {"full": TensorEntry("full", "float32", (3,), ()), "empty": TensorEntry("empty", "float32", (0,), ())}
    boxes = {"full": Box((3,), (0,)), "empty": Box((0,), (0,))}
    plan = plan_saves([Held(Description(entries, (), {}), boxes)])
    assert plan.shares[0].fqns == ("empty",)


def count_bytes(told: dict[str, list[int]]) -> None:
    """Note how much this rank gives to each collective of Python objects, by its name."""
    for name in ("gather", "gather_on_first", "from_first"):
        call = getattr(Ranks, name)

        def counted(self: Ranks, value: Any, action: str, name: str = name, call: Any = call) -> Any:
            told.setdefault(name, []).append(len(pickle.dumps(value)))
            return call(self, value, action)

        setattr(Ranks, name, counted)


def make_state(rank: int, num_tensors: int, value: float) -> dict[str, Any]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    place = dist.tensor.Shard(0)
    sharded = {
        f"layers.{i}.weight": dist.tensor.distribute_tensor(torch.full((7, 3), value + i), mesh, [place])
        for i in range(num_tensors)
    }
    return {"model": sharded, "steps": {f"{i}": torch.tensor(float(i)) for i in range(num_tensors)}, "done": value}


def saves(rank: int, folder: Path) -> list[dict[str, list[int]]]:
    """The bytes that this rank told in each of three saves, of which the last has another tensor."""
    told: dict[str, list[int]] = {}
    count_bytes(told)
    found = []
    with ckptool.AsyncSaver() as saver:
        for number, num_tensors in enumerate((200, 200, 201)):
            told.clear()
            state = make_state(rank, num_tensors, float(number))
            saver.save(state, folder / f"{number}").result()
            found.append(dict(told))
            loaded = make_state(rank, num_tensors, -1.0)
            ckptool.load(loaded, folder / f"{number}")
            for name, tensor in loaded["model"].items():
                assert torch.equal(tensor.to_local(), state["model"][name].to_local()), name
            assert loaded["done"] == number
    return found


def test_a_state_is_told_once_to_the_first_rank_and_again_when_it_changes(tmp_path: Path) -> None:
    for first, second, changed in run_ranks(3, saves, tmp_path):
        for told in (first, second, changed):
            assert sum(told["gather"]) < 2_000, "what all ranks are told"
        assert first["gather_on_first"][0] > 5_000
        assert [len(told["gather_on_first"]) for told in (first, second, changed)] == [2, 1, 2], (
            "the plan, and the files"
        )
        assert [len(told.get("from_first", [])) for told in (first, second, changed)] == [1, 0, 1]


def differing(rank: int, folder: Path) -> None:
    state = {"seen": torch.tensor(float(rank)), "same": torch.tensor(1.0)}
    with pytest.raises(ckptool.MismatchError, match=r"under one name.*seen"), ckptool.AsyncSaver() as saver:
        saver.save(state, folder / "one").result()
    with pytest.raises(ckptool.MismatchError, match=r"under one name.*seen"):
        ckptool.save(state, folder / "other", provenance=ckptool.Provenance("0"))


def test_values_that_differ_are_named_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, differing, tmp_path)
