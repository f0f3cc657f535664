"""The model without its optimizer, from a nested dict, a flat one, and DCP in safetensors, where all names are flat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.core.plan import Result
from ckptool.errors import NotFoundError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.naming.sections import read_sections

WEIGHTS = {"w": torch.arange(12.0).view(4, 3), "v": torch.ones(5)}
NESTED = {"model": WEIGHTS, "optim": {"state": {"w": {"exp_avg": torch.full((4, 3), 2.0)}}}}
FLAT = {"model.w": WEIGHTS["w"], "model.v": WEIGHTS["v"], "optim.state.w.exp_avg": torch.full((4, 3), 2.0)}
NO_OPTIMIZER = "no name says that it is an optimizer's"


def save(state: dict[str, Any], path: Path, *, safetensors: bool = False) -> Path:
    if safetensors:
        writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture(params=["nested", "flat", "safetensors"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    state = FLAT if request.param == "flat" else NESTED
    return save(state, tmp_path / "c", safetensors=request.param == "safetensors")


def copy(source: Path, target: Path) -> Result:
    return ckptool.copy(str(source), str(target), model_only=True)


def reshard(source: Path, target: Path) -> Result:
    return ckptool.reshard(str(source), str(target), mesh=Mesh.of({"dp": 2}), model_only=True)


@pytest.mark.parametrize("command", [copy, reshard])
def test_the_optimizer_is_left_out_and_the_model_still_known_as_one(
    stored: Path, tmp_path: Path, command: Callable[[Path, Path], Result]
) -> None:
    result = command(stored, tmp_path / "model")
    assert not any(NO_OPTIMIZER in note for note in result.notes)
    manifest = read_manifest(tmp_path / "model")
    assert set(manifest.tensors) == {"model.w", "model.v"}
    assert read_sections(manifest).model == {"w": "model.w", "v": "model.v"}
    for state in ({"model": {n: torch.zeros_like(t) for n, t in WEIGHTS.items()}}, {"model.w": torch.zeros(4, 3)}):
        dcp.load(state, checkpoint_id=tmp_path / "model", no_dist=True)
        loaded: Any = state["model"]["w"] if isinstance(state.get("model"), dict) else state["model.w"]
        assert torch.equal(loaded, WEIGHTS["w"])


@pytest.mark.parametrize("safetensors", [False, True])
@pytest.mark.parametrize("command", [copy, reshard])
def test_names_in_no_section_are_all_the_model_and_a_note_says_so(
    tmp_path: Path, command: Callable[[Path, Path], Result], safetensors: bool
) -> None:
    """The Hub's own names, some of which begin with `model.`."""
    weights = {"model.layers.0.w": torch.ones(3, 2), "lm_head.weight": torch.ones(2)}
    result = command(save(weights, tmp_path / "c", safetensors=safetensors), tmp_path / "model")
    assert any(NO_OPTIMIZER in note for note in result.notes)
    assert set(ckptool.inspect(str(tmp_path / "model")).details["sections"].items()) == {("model", 2)}


def test_an_export_has_the_models_own_names(stored: Path, tmp_path: Path) -> None:
    ckptool.export(str(stored), out=tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()


def test_a_checkpoint_is_compared_with_a_nested_one(stored: Path, tmp_path: Path) -> None:
    other = save(NESTED, tmp_path / "other")
    compared = ckptool.diff(str(stored), str(other))
    assert compared.equal and "model.w" in {tensor.fqn for tensor in compared.tensors}
    assert not any(tensor.fqn.startswith("model.optim") for tensor in compared.tensors)
    assert ckptool.verify(str(other), against=str(stored)).findings == ()


def test_only_the_model_of_safetensors_is_compared_and_imported(tmp_path: Path) -> None:
    folder = save(FLAT, tmp_path / "c", safetensors=True)
    with pytest.raises(NotFoundError, match=r"optim\.\*") as refused:
        ckptool.diff(str(folder), str(save(FLAT, tmp_path / "other")), keys="optim.*")
    assert "only model.* is compared" in refused.value.hint
    result = ckptool.import_hf(str(folder), "new", root=tmp_path)
    assert set(read_manifest(tmp_path / "new").tensors) == {"model.w", "model.v"}
    assert any("left out" in note and "optim.state.w.exp_avg" in note for note in result.notes)
