"""Parts of a model, and tied weights taken apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptool
from ckptool.cli.main import run
from ckptool.core.mesh import Mesh
from ckptool.errors import MismatchError, NotFoundError, UsageError
from tests.families.tiny import build
from tests.tiny_models import llama, mixtral, save_folder


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return save_folder(llama(), tmp_path / "model")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("engine", ["stream", "torch"])
def test_an_export_untied(tied: Path, tmp_path: Path, engine: str) -> None:
    ckptool.import_hf(str(tied), "base", root=tmp_path)
    ckptool.export("base", root=tmp_path, untie=True, engine=engine)
    out = tmp_path / "base-hf"
    found, stored = tensors(out), tensors(tied)
    assert torch.equal(found.pop("lm_head.weight"), stored["model.embed_tokens.weight"])
    assert set(found) == set(stored)
    assert config_of(out) == {**config_of(tied), "tie_word_embeddings": False}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokens = torch.arange(2, 14).view(1, -1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tied)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_an_import_untied_stays_so(tied: Path, tmp_path: Path) -> None:
    result = ckptool.import_hf(str(tied), "base", root=tmp_path, untie=True, dtype="fp32", chunk_bytes=1000)
    assert "untied: lm_head.weight" in result.notes
    manifest = ckptool.open_checkpoint(tmp_path / "base")
    assert manifest.ties == {}
    places = [manifest.tensors[f"model.{n}"].chunks[0].locator for n in ("lm_head.weight", "model.embed_tokens.weight")]
    assert places[0] != places[1]
    assert config_of(tmp_path / "base" / "hf")["tie_word_embeddings"] is False
    ckptool.export("base", root=tmp_path, dtype="bf16")
    found, stored = tensors(tmp_path / "base-hf"), tensors(tied)
    assert torch.equal(found.pop("lm_head.weight"), stored["model.embed_tokens.weight"])
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    assert config_of(tmp_path / "base-hf")["tie_word_embeddings"] is False


def test_a_part_is_imported(tied: Path, tmp_path: Path) -> None:
    result = ckptool.import_hf(
        str(tied), "part", root=tmp_path, keys=["model.model.layers.0.*", "*norm*"], exclude=["*.mlp.*"]
    )
    found = set(ckptool.open_checkpoint(tmp_path / "part").tensors)
    assert "model.model.layers.0.self_attn.q_proj.weight" in found and "model.model.norm.weight" in found
    assert not any(".mlp." in name or "embed" in name or "lm_head" in name for name in found)
    assert any("leave out" in note for note in result.notes)


def test_a_part_is_exported(tied: Path, tmp_path: Path) -> None:
    ckptool.import_hf(str(tied), "base", root=tmp_path)
    ckptool.export("base", root=tmp_path, keys=["model.model.layers.1.*"], exclude=["*proj*"])
    norms = {"model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"}
    assert set(tensors(tmp_path / "base-hf")) == norms
    ckptool.export("base", to="torch", root=tmp_path, out=tmp_path / "part.pt", exclude=["*layers*"])
    state = torch.load(tmp_path / "part.pt", weights_only=True)["model"]
    assert set(state) == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}


def test_a_part_of_what_is_converted_together(tmp_path: Path) -> None:
    folder = save_folder(mixtral(), tmp_path / "model")
    ckptool.import_hf(str(folder), "base", root=tmp_path)
    result = ckptool.export("base", root=tmp_path, keys=["*layers.0.mlp.experts.gate_up_proj"])
    found, stored = tensors(Path(result.target)), tensors(folder)
    assert len(found) == 10 and all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


def test_a_part_that_was_imported_is_exported_and_verified(tied: Path, tmp_path: Path) -> None:
    ckptool.import_hf(str(tied), "base", root=tmp_path, exclude=["*layers.1*", "*norm*"])
    result = ckptool.export("base", root=tmp_path, dtype="fp32")
    assert "only a part, 8 tensors of the model: the import left the others out" in result.notes
    found, stored = tensors(tmp_path / "base-hf"), tensors(tied)
    kept = {name for name in stored if "layers.1" not in name and "norm" not in name}
    assert set(found) == kept and all(torch.equal(found[name], stored[name].float()) for name in kept)
    ckptool.reshard("base", "again", mesh=Mesh.parse("dp_shard=2"), root=tmp_path)
    for name in ("base", "again", str(tmp_path / "base-hf")):
        verified = ckptool.verify(name, root=tmp_path, level="content", finite=True)
        assert verified.findings == ()
    assert ckptool.verify("again", root=tmp_path, against="base").findings == ()
    again = ckptool.export("again", root=tmp_path, out=tmp_path / "from-again")
    assert set(tensors(Path(again.target))) == kept


def test_a_part_of_what_the_hub_has_as_one_is_refused(tmp_path: Path) -> None:
    """RADIO's queries, keys and values are one tensor on the Hub, and three in the model."""
    folder = tmp_path / "model"
    build("radio").save_pretrained(folder)
    ckptool.import_hf(str(folder), "part", root=tmp_path, keys=["*layer.0.attention*"], exclude=["*k*.weight"])
    with pytest.raises(MismatchError, match=r"attn\.qkv\.weight is made of .*q[a-z_]+\.weight.*the import left out"):
        ckptool.export("part", root=tmp_path)
    ckptool.import_hf(str(folder), "layer", root=tmp_path, keys=["*layer.0.attention*"])
    ckptool.export("layer", root=tmp_path)
    found, stored = tensors(tmp_path / "layer-hf"), tensors(folder)
    assert {name.rpartition("attn.")[2] for name in found} >= {"qkv.weight", "qkv.bias"}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


def test_nothing_chosen_is_an_error(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="leave nothing"):
        ckptool.import_hf(str(tied), "base", root=tmp_path, keys=["zzz"])
    ckptool.import_hf(str(tied), "base", root=tmp_path)
    for to in ("hf", "torch"):
        with pytest.raises(NotFoundError):
            ckptool.export("base", to=to, root=tmp_path, keys=["zzz"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "model"]


def test_options_that_do_not_go_together(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--engine stream"):
        ckptool.import_hf(str(tied), "base", root=tmp_path, untie=True, engine="transformers")
    ckptool.import_hf(str(tied), "base", root=tmp_path)
    with pytest.raises(UsageError, match="--engine stream"):
        ckptool.export("base", root=tmp_path, keys=["*"], engine="torch")
    with pytest.raises(UsageError, match="--untie"):
        ckptool.export("base", root=tmp_path, to="torch", untie=True)


def test_on_the_command_line(tied: Path, tmp_path: Path) -> None:
    root = ["--root", str(tmp_path), "--quiet"]
    assert run(["import-hf", str(tied), "base", "--untie", "--exclude", "*layers.1*", *root]) == 0
    assert len(ckptool.open_checkpoint(tmp_path / "base").tensors) == 3 + 9
    assert run(["export", "base", *root]) == 0
    assert len(tensors(tmp_path / "base-hf")) == 3 + 9
    assert run(["import-hf", str(tied), "whole", *root]) == 0
    assert run(["export", "whole", "--keys", "*norm*", "--keys", "*head*", "--untie", *root]) == 0
    assert set(tensors(tmp_path / "whole-hf")) >= {"lm_head.weight", "model.norm.weight"}
