"""Every name is accounted for on every run: made once, used once, there, and with a place; else it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.cuts import cut_tensor
from ckptool.core.provenance import Naming
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import DamagedError, MismatchError
from ckptool.naming.dialects import load_dialect
from ckptool.naming.groups import NameGroup, NamePlan
from ckptool.naming.name_table import groups_from_live, groups_to_live
from ckptool.planner import plan_conversion
from tests.tiny_models import llama, save_folder


def plan(*groups: NameGroup) -> None:
    entries = {name: TensorEntry(name, "float32", (2, 3), (Chunk(Box.whole((2, 3))),)) for name in "abc"}
    names = NamePlan(groups, Naming("test"))
    plan_conversion("test", Manifest("here", entries), names, "there", cut=cut_tensor, piece_bytes=1 << 20)


def test_a_target_is_made_once_and_a_source_used_once() -> None:
    shape = (2, 3)
    plan(NameGroup(("a",), {"x": shape}), NameGroup(("b",), {"y": shape}))
    with pytest.raises(MismatchError, match="would be made twice: x"):
        plan(NameGroup(("a",), {"x": shape}), NameGroup(("b",), {"x": shape}))
    with pytest.raises(MismatchError, match="would be used twice: a"):
        plan(NameGroup(("a",), {"x": shape}), NameGroup(("a",), {"y": shape}))


def test_chunks_cover_every_element_once() -> None:
    upper, lower = Box((0, 0), (1, 3)), Box((1, 0), (1, 3))
    for boxes in ((upper,), (upper, upper), (upper, Box((0, 0), (2, 3)))):
        entry = TensorEntry("a", "float32", (2, 3), tuple(map(Chunk, boxes)))
        with pytest.raises(DamagedError):
            Manifest("here", {"a": entry}).check_cover()
    Manifest("here", {"a": TensorEntry("a", "float32", (2, 3), (Chunk(upper), Chunk(lower)))}).check_cover()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("absent", r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unknown", r"has no place for model\.layers\.1\.mlp\.gate\.weight"),
        ("two of one name", r"norm\.weight.* both become model\.norm\.weight"),
    ],
)
def test_names_of_a_hub_model(tmp_path: Path, change: str, says: str) -> None:
    folder = save_folder(llama(), tmp_path / "hub")
    tensors = load_file(folder / "model.safetensors")
    if change == "absent":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "unknown":
        tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(3)
    else:
        tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=says):
        ckptool.import_hf(str(folder), "c", root=tmp_path)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("library", ["torchtitan", "torchtune", "olmo_core"])
def test_names_of_another_library(library: str) -> None:
    model, dialect = llama(tied=False), load_dialect(library)
    live = {name: TensorEntry(name, "float32", tuple(t.shape), ()) for name, t in model.state_dict().items()}
    theirs = {
        name: shape for group in groups_from_live(dialect, live, model.config) for name, shape in group.targets.items()
    }
    entries = {name: TensorEntry(name, "float32", shape, ()) for name, shape in theirs.items()}
    groups, _ = groups_to_live(dialect, entries, model.config)
    assert {name for group in groups for name in group.sources} == set(theirs)
    assert {name for group in groups for name in group.targets} == set(live)
    with pytest.raises(MismatchError, match=r"has no tensor layers\.0\.surplus"):
        groups_to_live(dialect, entries | {"layers.0.surplus": live["lm_head.weight"]}, model.config)
    with pytest.raises(MismatchError, match=r"has no tensor for model\.surplus"):
        groups_from_live(dialect, live | {"model.surplus": live["lm_head.weight"]}, model.config)
