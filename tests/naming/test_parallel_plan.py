"""Our reading of transformers' parallel plans is what transformers itself does with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptool.core.layout import Rule
from ckptool.errors import NotFoundError, UnsupportedError
from ckptool.naming.parallel_plan import plan_rules
from tests.tiny_models import SIZES

CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, mlp_only_layers=[0], tie_word_embeddings=False
    ),
    "gpt_oss": transformers.GptOssConfig(**SIZES, num_local_experts=4),
    "phi3": transformers.Phi3Config(**{**SIZES, "bos_token_id": 1}),
}


@pytest.fixture
def tp_mesh() -> Iterator[object]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def folder_of(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def placed_by_transformers(model: torch.nn.Module, plan: dict[str, str], mesh: object) -> dict[str, tuple[int, int]]:
    """(dim, number of parts) of every parameter that transformers cuts."""
    from transformers.distributed import expert_parallel, tensor_parallel  # noqa: F401 - each registers its styles
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    parameters = dict(model.named_parameters())
    for name, style in model._expand_parallel_plan(plan).items():  # type: ignore[operator]
        if name in parameters:
            module, _, parameter = name.rpartition(".")
            ALL_PARALLEL_STYLES[style].shard_param(model.get_submodule(module), parameter, mesh)
    found = {}
    for name, parameter in model.named_parameters():
        placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
        if isinstance(placement, _StridedShard):
            found[name] = (placement.dim % parameter.ndim, placement.split_factor)
        elif isinstance(placement, TorchShard):
            found[name] = (placement.dim % parameter.ndim, 1)
    return found


def as_placed(rules: list[Rule], model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    return {rule.pattern: (rule.dim % shapes[rule.pattern], rule.num_parts) for rule in rules if rule.dim is not None}


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_cut_as_transformers_cuts_them(family: str, axis: str, tmp_path: Path, tp_mesh: object) -> None:
    pytest.importorskip("transformers.distributed.parallel_utils", reason="transformers before 5.20 does it elsewhere")
    config = CONFIGS[family]
    folder = folder_of(config, tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = model.tp_plan if axis == "tp" else model.ep_plan
    if not plan:
        with pytest.raises(UnsupportedError, match=f"no {axis} plan for {type(model).__name__}"):
            plan_rules(folder, [axis], 1000, 1 << 30)
        return
    rules = plan_rules(folder, [axis], 1000, 1 << 30)
    expected = placed_by_transformers(model, plan, tp_mesh)
    assert expected and as_placed(rules, model) == expected


def test_experts_that_ep_cuts_are_left_alone_by_tp(tmp_path: Path) -> None:
    rules = plan_rules(folder_of(CONFIGS["qwen3_moe"], tmp_path), ["tp", "ep"], 1000, 1 << 30)
    axes: dict[str, list[str]] = {}
    for rule in rules:
        axes.setdefault(rule.pattern, []).append(rule.axis)
    assert axes["model.layers.1.mlp.experts.gate_up_proj"] == ["ep"]
    assert axes["model.layers.1.self_attn.q_proj.weight"] == ["tp"]


def test_an_embeddings_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans before transformers 5.20 name an embedding's styles as a projection's."""
    folder = folder_of(CONFIGS["llama"], tmp_path)
    for style, dim in (("rowwise", 0), ("colwise", 1), ("embedding_rowwise", 0), ("embedding_colwise", 1)):
        plan = {"model.embed_tokens": style}
        monkeypatch.setattr(transformers.LlamaForCausalLM, "tp_plan", plan)
        assert plan_rules(folder, ["tp"], 1000, 1 << 30) == [Rule("tp", "model.embed_tokens.weight", dim)]


def test_a_style_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(CONFIGS["llama"], tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "tp_plan", {"lm_head": "spiral"})
    with pytest.raises(
        UnsupportedError, match=r"lm_head\.weight: transformers' tp plan has the unknown style 'spiral'"
    ):
        plan_rules(folder, ["tp"], 1000, 1 << 30)


def test_a_model_without_a_config_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no config\.json, so that its tp plan is not known") as caught:
        plan_rules(tmp_path, ["tp"], 10, 1000)
    assert caught.value.hint == "write the placements into a file: --placements FILE"
