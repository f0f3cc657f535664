"""A folder that peft has saved, imported onto its base. peft itself gives the logits, and reads what is exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import ckptool
from ckptool.cli.main import run
from ckptool.errors import DamagedError, MismatchError, NotFoundError, UnsupportedError, UsageError
from tests.ops.test_export_adapter import TARGETS, adapted, assert_computes
from tests.tiny_models import llama, save_folder

peft = pytest.importorskip("peft", reason="pip install ckptool[lora]")

#: Every layer counts differently: ranks, alphas and the square root.
UNEVEN = {
    "rank_pattern": {"down_proj": 2},
    "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 11},
    "use_rslora": True,
    "init_lora_weights": "gaussian",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a base, `hub`, and of two adapters on it; `even` and `uneven` are the base's imports with each."""
    root = tmp_path_factory.mktemp("root")
    save_folder(llama(dtype=torch.float32), root / "hub")
    for name, options in (("even", {}), ("uneven", UNEVEN)):
        adapted(root / "hub", **options).save_pretrained(root / f"{name}-peft")
        command = ["import-hf", str(root / "hub"), name, "--root", str(root), "--adapter", str(root / f"{name}-peft")]
        assert run(command) == 0
    return root


def options_of(name: str) -> dict[str, Any]:
    return UNEVEN if name == "uneven" else {}


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_the_folder_comes_back_byte_for_byte(root: Path, tmp_path: Path, name: str) -> None:
    ckptool.export(name, root=root, adapter="folder", out=tmp_path / "out")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (root / f"{name}-peft" / file).read_bytes()


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_merged_it_computes_what_peft_computes(root: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="an adapter beside its model"):
        ckptool.export(name, root=root, out=tmp_path / "out")
    ckptool.export(name, root=root, adapter="merge", out=tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_computes(merged, adapted(root / "hub", **options_of(name)))


def test_a_model_of_peft_is_filled_by_stock_load_and_what_it_saves_exports(root: Path, tmp_path: Path) -> None:
    """The renaming is that of docs/howto/import.md."""
    model = adapted(root / "hub")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {re.sub(r"^base_model\.model\.|\.base_layer|\.default", "", n): t for n, t in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied
    dcp.load({"model": state}, checkpoint_id=root / "even", no_dist=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())

    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    as_before = {"config": str(root / "hub"), "lora_alpha": 5.0}
    ckptool.export(str(tmp_path / "theirs"), adapter="merge", out=tmp_path / "merged", **as_before)
    assert_computes(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), model)
    with pytest.raises(UsageError, match="an adapter beside its model"):
        ckptool.export(str(tmp_path / "theirs"), out=tmp_path / "out")


def changed(root: Path, path: Path, **settings: Any) -> str:
    """A copy of the adapter with another config."""
    shutil.copytree(root / "even-peft", path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | settings))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"peft_type": "LOHA"}, UnsupportedError, "of the kind LOHA"),
        ({"use_dora": True}, UnsupportedError, "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
        ({"a_setting_to_come": 3}, UnsupportedError, "a_setting_to_come 3"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "changes the base's weights"),
        ({"r": 4}, MismatchError, r"says rank 4, and that of model\.layers\.0\.\S+ is 3"),
        ({"r": "many"}, DamagedError, "not numbers"),
        ({"rank_pattern": {"(": 3}}, DamagedError, "not numbers"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    root: Path, tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ckptool.import_hf(str(root / "hub"), "no", root=tmp_path, adapter=changed(root, tmp_path / "a", **settings))
    assert not (tmp_path / "no").exists()


def test_an_adapter_of_another_model_and_what_is_none_are_refused(root: Path, tmp_path: Path) -> None:
    def import_onto(hub: Path, adapter: Path) -> None:
        ckptool.import_hf(str(hub), "no", root=tmp_path, adapter=str(adapter))

    for name, sizes in (("shallow", {"num_hidden_layers": 1}), ("wide", {"intermediate_size": 96})):
        save_folder(llama(dtype=torch.float32, **sizes), tmp_path / name)
    with pytest.raises(MismatchError, match=r"shallow, with \S+, has no layer model\.layers\.1\.\S+, model"):
        import_onto(tmp_path / "shallow", root / "even-peft")
    with pytest.raises(MismatchError, match=r"down_proj is \[48, 96\], and its adapter \[48, 80\]"):
        import_onto(tmp_path / "wide", root / "even-peft")
    with pytest.raises(UsageError, match="is an adapter, no model"):
        ckptool.import_hf(str(root / "even-peft"), "no", root=tmp_path)
    with pytest.raises(NotFoundError, match=r"there is no adapter_config\.json"):
        import_onto(root / "hub", root / "hub")
    with pytest.raises(UsageError, match="goes with --engine stream"):
        ckptool.import_hf(
            str(root / "hub"), "no", root=tmp_path, adapter=str(root / "even-peft"), engine="transformers"
        )


def test_what_shares_its_weight_is_not_merged(root: Path, tmp_path: Path) -> None:
    """The head's weight is the embedding's."""
    adapted(root / "hub", [*TARGETS, "lm_head"]).save_pretrained(tmp_path / "peft")
    ckptool.import_hf(str(root / "hub"), "tied", root=tmp_path, adapter=str(tmp_path / "peft"))
    with pytest.raises(UnsupportedError, match="lm_head shares its weight"):
        ckptool.export("tied", root=tmp_path, adapter="merge")
    ckptool.import_hf(str(root / "hub"), "apart", root=tmp_path, adapter=str(tmp_path / "peft"), untie=True)
    ckptool.export("apart", root=tmp_path, adapter="merge", out=tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_computes(merged, adapted(root / "hub", [*TARGETS, "lm_head"]))
