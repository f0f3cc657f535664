"""transformers' own tensor- and expert-parallel plans as placement rules.

A plan maps a module or parameter, layer numbers as `*`, to a style. What each style does to a parameter is that of
`shard_param` in transformers/distributed/tensor_parallel.py and expert_parallel.py; a test holds both together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ckptool.core.layout import Rule
from ckptool.errors import NotFoundError, UnsupportedError
from ckptool.naming.meta_model import build_meta_model, is_custom_code, read_config

PLAN_AXES = ("tp", "ep")

_OUTPUT_FEATURES = {"colwise", "colwise_rep", "colwise_gather_output"}
_INPUT_FEATURES = {"rowwise", "rowwise_rep", "rowwise_split_input"}
_FIRST_DIM = {"embedding_rowwise", "grouped_gemm"}
_WHOLE = {
    *("replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "mla_kv_a_proj"),
    *("moe_tp_experts", "moe_identity_expert", "local_params", "ep_dispatch_experts", "ep_router"),
}

#: What transformers before 5.20 means by these on an embedding.
_EMBEDDING_STYLES = {"colwise": "embedding_colwise", "rowwise": "embedding_rowwise"}

#: gate_proj and up_proj, fused.
_PACKED_PARTS = 2


def plan_rules(folder: Path, axes: Collection[str], num_tensors: int, num_bytes: int) -> list[Rule]:
    """Rules for those of the axes "tp" and "ep" in `axes`, one by parameter of the model in `folder`'s config.json.

    `num_tensors` and `num_bytes` are those of the model's weights. Raises NotFoundError without a config,
    UnsupportedError when transformers has no plan for the model or one with a style unknown here.
    """
    config = read_config(folder, num_tensors, num_bytes)
    if config is None or is_custom_code(config):
        reason = "has no config.json" if config is None else "is a model of the repository's own code"
        raise NotFoundError(
            f"{folder} {reason}, so that its {'/'.join(axes)} plan is not known",
            hint="write the placements into a file: --placements FILE",
        )
    model = build_meta_model(folder)
    plans: dict[str, Mapping[str, str]] = {
        "tp": getattr(model, "tp_plan", None) or {},
        "ep": getattr(model, "_ep_plan", None) or {},
    }
    for axis in axes:
        if not plans[axis]:
            raise UnsupportedError(
                f"transformers has no {axis} plan for {type(model).__name__}",
                hint="write the placements into a file: --placements FILE",
            )
    rules = []
    for name, parameter in model.named_parameters():
        is_embedding = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding)
        by_expert = "ep" in axes and _style(name, plans["ep"]) is not None
        for axis in axes:
            style = None if axis == "tp" and by_expert else _style(name, plans[axis])
            if style is not None:
                style = _EMBEDDING_STYLES.get(style, style) if is_embedding else style
                rules.append(_rule(axis, name, style, parameter.ndim))
    return [rule for rule in rules if rule.dim is not None]


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a parameter: its own, or that of the module it is in."""
    for candidate in (name, name.rpartition(".")[0]):
        for pattern, style in plan.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), candidate):
                return style
    return None


def _rule(axis: str, name: str, style: str, num_dims: int) -> Rule:
    is_vector = num_dims == 1
    if style in _OUTPUT_FEATURES:
        return Rule(axis, name, 0 if is_vector else -2)
    if style in _INPUT_FEATURES:
        return Rule(axis, name, None if name.rpartition(".")[2] == "bias" else -1)
    if style == "packed_colwise":
        return Rule(axis, name, 0) if is_vector else Rule(axis, name, -2, _PACKED_PARTS)
    if style == "packed_rowwise":
        return Rule(axis, name, None) if is_vector else Rule(axis, name, -1, _PACKED_PARTS)
    if style in _FIRST_DIM:
        return Rule(axis, name, 0)
    if style == "embedding_colwise":
        return Rule(axis, name, 1)
    if style in _WHOLE:
        return Rule(axis, name, None)
    raise UnsupportedError(
        f"{name}: transformers' {axis} plan has the unknown style {style!r}",
        hint="write the placements into a file: --placements FILE",
    )
