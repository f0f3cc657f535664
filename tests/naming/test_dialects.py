"""Namings as files: the how-to's own example, torchtune's, and what each must say of itself."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import ckptool
from ckptool.core.tensors import TensorEntry
from ckptool.errors import MismatchError, NotFoundError
from ckptool.naming import dialects
from ckptool.naming.name_table import groups_from_live, groups_to_live
from tests.docs.pages import TOP
from tests.tiny_models import SIZES, llama


def neighbours(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of a head's first half beside row i of its second half, one by one."""
    half = weight.shape[0] // num_heads // 2
    order = [head * 2 * half + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


@pytest.fixture
def own_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of docs/howto/add-a-naming.md, as if it lay beside the others."""
    page = (TOP / "docs" / "howto" / "add-a-naming.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "dialects").mkdir()
    (tmp_path / "dialects" / "mytrainer.py").write_text(code)
    monkeypatch.setattr(dialects, "__path__", [*dialects.__path__, str(tmp_path / "dialects")])
    return "mytrainer"


MYTRAINER = {
    "model.embed_tokens": "emb",
    "model.norm": "final_norm",
    "lm_head": "head",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}

TORCHTUNE = {
    "model.embed_tokens": "tok_embeddings.weight",
    "model.norm": "norm.scale",
    "lm_head": "output.weight",
    "input_layernorm": "sa_norm.scale",
    "post_attention_layernorm": "mlp_norm.scale",
    "self_attn.q_proj": "attn.q_proj.weight",
    "self_attn.k_proj": "attn.k_proj.weight",
    "self_attn.v_proj": "attn.v_proj.weight",
    "self_attn.o_proj": "attn.output_proj.weight",
    "mlp.gate_proj": "mlp.w1.weight",
    "mlp.up_proj": "mlp.w3.weight",
    "mlp.down_proj": "mlp.w2.weight",
}


def renamed(model: Any, names: dict[str, str], layer: str) -> dict[str, torch.Tensor]:
    """A Llama's tensors as such a trainer has them."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    state = {}
    for name, tensor in model.state_dict().items():
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.weight", name)
        assert match is not None
        num_heads = heads.get(match[2].rpartition(".")[2])
        theirs = (layer.format(match[1]) if match[1] else "") + names[match[2]]
        state[theirs] = neighbours(tensor, num_heads) if num_heads else tensor.clone()
    return state


def mytrainer(model: Any) -> dict[str, torch.Tensor]:
    state = renamed(model, MYTRAINER, "blocks.{}.")
    for name in [name for name in state if name.endswith(".up")]:
        up = state.pop(name)
        state[name + "_first_half"], state[name + "_second_half"] = up.chunk(2)
    return {**state, "blocks.0.rope_cache": torch.ones(3)}


def torchtune(model: Any) -> dict[str, torch.Tensor]:
    return renamed(model, TORCHTUNE, "layers.{}.")


@pytest.mark.parametrize(("name", "make"), [("mytrainer", mytrainer), ("torchtune", torchtune)])
def test_34_a_dialect_goes_there_and_back(
    tmp_path: Path, own_dialect: str, name: str, make: Callable[[Any], dict[str, torch.Tensor]]
) -> None:
    """torchtitan#1291: the order of rows is tested by logits."""
    model = llama(tied=False, dtype=torch.float32)
    model.config.save_pretrained(tmp_path / "like")
    dcp.save({"model": make(model), "optimizer": {"a": 1}}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(NotFoundError, match=f"names of {name}"):
        ckptool.export(str(tmp_path / "c"))
    ckptool.export(str(tmp_path / "c"), config=str(tmp_path / "like"), out=tmp_path / "out")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(2, 14).view(1, -1)
    assert torch.equal(ours(tokens).logits, model(tokens).logits)
    ckptool.export(str(tmp_path / "c"), config=str(tmp_path / "like"), to=name, out=tmp_path / "again", dtype="bf16")
    made = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in make(model).items() if "rope_cache" not in n}
    dcp.load({"model": made}, checkpoint_id=tmp_path / "again", no_dist=True)
    assert all(torch.equal(tensor, make(model)[n].bfloat16()) for n, tensor in made.items())


@pytest.mark.skipif(importlib.util.find_spec("torchtune") is None, reason="torchtune is not installed")
def test_torchtunes_own_conversion_gives_the_same_tensors() -> None:
    """Its file alone is loaded: the package as a whole wants an older torch."""
    found = importlib.util.find_spec("torchtune")
    assert found is not None and found.submodule_search_locations
    file = Path(found.submodule_search_locations[0], "models", "convert_weights.py")
    spec = importlib.util.spec_from_file_location("convert_weights", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = llama(tied=False, dtype=torch.float32)
    expected = module.hf_to_tune(model.state_dict(), num_heads=6, num_kv_heads=2, dim=48, head_dim=8)
    ours = torchtune(model)
    assert set(ours) == set(expected) and all(torch.equal(ours[n], tensor) for n, tensor in expected.items())


TABLES = [(name, kind) for name in dialects.dialect_names() for kind in dialects.load_dialect(name).tables]


@pytest.mark.parametrize(("name", "kind"), TABLES)
def test_a_table_covers_the_whole_model_both_ways(name: str, kind: str) -> None:
    from tests.families.tiny import build

    config = build(kind).config
    with torch.device("meta"):
        live = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    dialect = dialects.load_dialect(name)
    entries = {n: TensorEntry(n, "float32", tuple(t.shape), ()) for n, t in live.items()}
    theirs = {n: shape for group in groups_from_live(dialect, entries, config) for n, shape in group.targets.items()}
    assert set(dialect.marks) <= set(theirs)
    groups, _ = groups_to_live(dialect, {n: TensorEntry(n, "float32", s, ()) for n, s in theirs.items()}, config)
    back = {n: shape for group in groups for n, shape in group.targets.items()}
    assert back == {n: tuple(t.shape) for n, t in live.items()}


def test_names_and_models_that_a_table_lacks_are_refused(tmp_path: Path) -> None:
    model = llama(tied=False)
    model.config.save_pretrained(tmp_path / "like")
    state = torchtune(model)
    dcp.save({"model": {**state, "layers.0.attn.sinks": torch.ones(2)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(MismatchError, match=r"torchtune's llama has no tensor layers\.0\.attn\.sinks"):
        ckptool.export(str(tmp_path / "c"), config=str(tmp_path / "like"))
    del state["layers.1.mlp.w2.weight"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(MismatchError, match=r"lack model\.layers\.1\.mlp\.down_proj\.weight"):
        ckptool.export(str(tmp_path / "d"), config=str(tmp_path / "like"))
    transformers.GemmaConfig(**SIZES).save_pretrained(tmp_path / "other")
    with pytest.raises(MismatchError, match="'gemma'"):
        ckptool.export(str(tmp_path / "d"), config=str(tmp_path / "other"))
