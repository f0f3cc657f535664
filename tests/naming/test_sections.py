"""Where in a trainer's checkpoint the model is, and what it calls its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptool
from ckptool.cli.main import run
from ckptool.errors import MismatchError, NotFoundError, UnsupportedError
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.naming.sections import read_sections
from tests.tiny_models import llama

Export = Callable[..., transformers.PreTrainedModel]


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def optimizer(model: torch.nn.Module) -> dict[str, Any]:
    return {"state": {name: {"exp_avg": torch.zeros_like(t)} for name, t in model.state_dict().items()}}


@pytest.fixture
def model() -> transformers.LlamaForCausalLM:
    return llama(tied=False, dtype=torch.float32)


@pytest.fixture
def like(tmp_path: Path, model: transformers.LlamaForCausalLM) -> Path:
    """Its config alone, for checkpoints without one."""
    model.config.save_pretrained(tmp_path / "like")
    return tmp_path / "like"


def assert_exports(path: Path, like: Path, model: transformers.PreTrainedModel) -> list[str]:
    """The export is the model, bit for bit; returns its notes."""
    result = ckptool.export(str(path), config=str(like), out=path.parent / "out")
    ours = type(model).from_pretrained(path.parent / "out").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())
    return list(result.notes)


LAYOUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tutorial": lambda m: {"model": m.state_dict(), "optim": optimizer(m), "step": 3},
    "stateful": lambda m: {"app": {"model": m.state_dict(), "optim": optimizer(m)}},
    "fabric": lambda m: {"state": {"model": m.state_dict(), "optimizer": optimizer(m), "iter": torch.tensor(2)}},
    "bare": lambda m: dict(m.state_dict()),
    "bare beside an optimizer": lambda m: {**m.state_dict(), "optimizer": optimizer(m), "train_state": {"step": 1}},
    "lightning": lambda m: {"state_dict": {f"net.{n}": t for n, t in m.state_dict().items()}, "optimizer_0": {"a": 1}},
    "ddp": lambda m: {"model_state_dict": {f"module.{n}": t for n, t in m.state_dict().items()}, "epoch": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_found_wherever_a_trainer_puts_it(tmp_path: Path, layout: str, model: Any, like: Path) -> None:
    path = save(LAYOUTS[layout](model), tmp_path / "c")
    assert_exports(path, like, model)
    sections = read_sections(read_manifest(path))
    assert len(sections.model) == len(model.state_dict())
    assert all(fqn.endswith(name) for name, fqn in sections.model.items())
    assert set(sections.counts()) <= {"model", "optimizer", "step", "other"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_shown_checked_and_resharded(tmp_path: Path, layout: str, model: Any) -> None:
    """All that is in it, under the trainer's own names."""
    path = save(LAYOUTS[layout](model), tmp_path / "c")
    assert run(["inspect", str(path)]) == 0 and run(["verify", str(path)]) == 0
    assert run(["reshard", str(path), str(tmp_path / "two"), "--world-size", "2", "--rewrite"]) == 0
    assert run(["verify", str(tmp_path / "two"), "--against", str(path)]) == 0
    before, after = (read_manifest(where) for where in (path, tmp_path / "two"))
    assert before.tensors.keys() == after.tensors.keys() and before.objects.keys() == after.objects.keys()
    assert any(len(entry.chunks) == 2 for entry in after.tensors.values())


def test_11_wrapped_and_plain_modules_export_alike(tmp_path: Path, model: Any, like: Path) -> None:
    """pytorch#117399, transformers#37519: names with the parts that wrappers put in."""
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    wrapped = torch.compile(model)
    # torch's wrapper hides its part in its own state_dict; FSDP's sharded one did not.
    names = {
        name.replace("self_attn.", "self_attn._fsdp_wrapped_module._checkpoint_wrapped_module."): tensor
        for name, tensor in wrapped.state_dict().items()
    }
    assert all(name.startswith("_orig_mod.") for name in names)
    path = save({"model": names, "step": 1}, tmp_path / "c")
    notes = assert_exports(path, like, llama(tied=False, dtype=torch.float32))
    assert any("_orig_mod" in note and "_fsdp_wrapped_module" in note for note in notes)
    assert set(read_sections(read_manifest(path)).model) == set(plain)


def test_11_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = save({"model": {"a.weight": torch.ones(2), "_orig_mod.a.weight": torch.zeros(2)}}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"both the model's a\.weight"):
        ckptool.export(str(path))
    assert run(["inspect", str(path)]) == 0


def test_parameters_that_fsdp_has_joined_are_refused(tmp_path: Path) -> None:
    path = save({"model": {"layers.0._fsdp_wrapped_module._flat_param": torch.ones(9)}}, tmp_path / "c")
    with pytest.raises(UnsupportedError, match="LOCAL_STATE_DICT"):
        ckptool.export(str(path))


def test_an_optimizer_alone_is_no_model(tmp_path: Path, model: Any) -> None:
    path = save({"optimizer": optimizer(model)}, tmp_path / "optimizer_0")
    with pytest.raises(NotFoundError, match="no tensors of a model") as refused:
        ckptool.export(str(path))
    assert "optimizer" in refused.value.hint


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "model"])
def test_31_a_folder_with_a_part_each_means_the_model(tmp_path: Path, folder: str, model: Any, like: Path) -> None:
    """NeMo-RL#1427, accelerate#2848: given the parent folder. tests/interop has it with accelerate itself."""
    save({"model": model.state_dict()}, tmp_path / "run" / folder)
    save({"optimizer": optimizer(model)}, tmp_path / "run" / "optimizer_0")
    assert_exports(tmp_path / "run", like, model)
    save({"model": model.state_dict()}, tmp_path / "run" / "pytorch_model_fsdp_1")
    with pytest.raises(NotFoundError, match="has some inside") as refused:
        ckptool.export(str(tmp_path / "run"))
    assert folder in refused.value.hint and "pytorch_model_fsdp_1" in refused.value.hint


def test_18_a_tie_whose_tensors_differ_is_told_and_kept(tmp_path: Path, like: Path) -> None:
    """accelerate#3870: the config says tied, the trainer saved two different tensors."""
    tied = llama(dtype=torch.float32)
    tied.config.save_pretrained(like)
    state = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    same = save({"model": state}, tmp_path / "same")
    assert_exports(same, like, tied)
    state["lm_head.weight"] += 1
    result = ckptool.export(str(save({"model": state}, tmp_path / "other")), config=str(like), out=tmp_path / "untied")
    assert any("differ" in note for note in result.notes)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    assert not ours.config.tie_word_embeddings
    assert torch.equal(ours.lm_head.weight, state["lm_head.weight"])


def test_33_a_renamed_parameter_is_not_left_out(tmp_path: Path, model: Any, like: Path) -> None:
    """torchtitan#4475, Megatron-LM#5844: one name that the model doesn't know, one that is absent."""
    state = dict(model.state_dict())
    state["model.layers.0.mlp.up.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    path = save({"model": state}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"layers\.0\.mlp\.up"):
        ckptool.export(str(path), config=str(like), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_16_a_trainer_with_the_hubs_expert_names_exports_the_same_model(tmp_path: Path) -> None:
    """Megatron-Bridge#4706, torchtitan#4373: experts one by one in the checkpoint, fused in the model."""
    from safetensors.torch import load_file

    from tests.tiny_models import mixtral, save_folder

    hub = save_folder(mixtral(), tmp_path / "hub")
    stored = load_file(hub / "model.safetensors")
    assert any("experts.0." in name for name in stored)
    path = save({"model": stored}, tmp_path / "c")
    ckptool.export(str(path), config=str(hub), out=tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert set(back) == set(stored) and all(torch.equal(back[name], tensor) for name, tensor in stored.items())
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == (hub / "chat_template.jinja").read_bytes()
    assert run(["verify", str(path), "--against", str(hub)]) == 3  # no config beside it: names stay the Hub's
    (tmp_path / "config.json").write_bytes((hub / "config.json").read_bytes())
    assert run(["verify", str(path), "--against", str(hub)]) == 0


def test_a_part_is_chosen_by_the_names_in_the_checkpoint(tmp_path: Path, model: Any, like: Path) -> None:
    path = save({"app": {"model": model.state_dict()}}, tmp_path / "c")
    ckptool.export(str(path), config=str(like), out=tmp_path / "out", keys=["app.model.lm_head.*"])
    from safetensors.torch import load_file

    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["lm_head.weight"]


def test_reshard_takes_the_model_alone_from_any_layout(tmp_path: Path, model: Any, like: Path) -> None:
    path = save(LAYOUTS["fabric"](model), tmp_path / "c")
    assert run(["reshard", str(path), str(tmp_path / "two"), "--world-size", "2", "--model-only"]) == 0
    assert {fqn.split(".")[0] for fqn in read_manifest(tmp_path / "two").tensors} == {"state"}
    assert_exports(tmp_path / "two", like, model)


FLAT: dict[str, tuple[list[str], dict[str, str]]] = {
    "model and optimizer": (["model.w", "optim.state.w.exp_avg", "step"], {"w": "model.w"}),
    "only a model": (["model.w", "model.v"], {"model.w": "model.w", "model.v": "model.v"}),
    "the Hub's names": (["model.w", "lm_head.w"], {"model.w": "model.w", "lm_head.w": "lm_head.w"}),
    "the Hub's names beside an optimizer": (
        ["model.w", "lm_head.w", "optim.state.model.w.exp_avg"],
        {"model.w": "model.w", "lm_head.w": "lm_head.w"},
    ),
    "a module called optimizer": (
        ["encoder.w", "optimizer.w"],
        {"encoder.w": "encoder.w", "optimizer.w": "optimizer.w"},
    ),
}


@pytest.mark.parametrize("case", FLAT)
def test_flat_names_tell_sections_where_a_model_and_an_optimizer_are_there(tmp_path: Path, case: str) -> None:
    fqns, model = FLAT[case]
    path = save({fqn: torch.ones(2) for fqn in fqns}, tmp_path / "c")
    assert read_sections(read_manifest(path)).model == model
