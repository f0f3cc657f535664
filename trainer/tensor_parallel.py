"""Tensor parallelism by transformers' own plan of a model (`tp_plan`), with torch's styles.

The plan says which linear layers split their output features (column-wise), which their input features (row-wise).
What it doesn't name is kept whole on every rank. All parameters become DTensors of the "tp" axis, so that FSDP2 shards
them over the data axes and gradient norms are global.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from ckptool import UnsupportedError, UsageError

#: Layers whose split output is put together again: heads over the vocabulary.
_GATHERED = ("colwise_rep", "colwise_gather_output")

#: The dim of (batch, tokens, heads, head size) that column-wise query and key projections split.
_HEADS_DIM = 2


class _Whole(ParallelStyle):
    """Keep a layer's parameters whole. Its input is split along `input_dim`, or on every rank the same (None)."""

    def __init__(self, input_dim: int | None = None) -> None:
        self._placement: Placement = Replicate() if input_dim is None else Shard(input_dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split_nothing(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in layer.named_parameters(recurse=False):
                whole = distribute_tensor(parameter, mesh, [Replicate()])
                layer.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def enter(layer: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [self._placement], run_check=False), *inputs[1:]

        def leave(layer: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
            return output.redistribute(placements=[self._placement]).to_local()

        return distribute_module(module, device_mesh, split_nothing, enter, cast(Any, leave))


def _style(name: str) -> ParallelStyle | None:
    """torch's style for a name in transformers' plans; None for one that this trainer doesn't know."""
    match name:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case _ if name in _GATHERED:
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":  # norms of single heads, between split projections
            return _Whole(_HEADS_DIM)
        case "replicate":
            return _Whole()
    return None


def split_tensors(model: PreTrainedModel, mesh: DeviceMesh, ties: dict[str, str]) -> None:
    """Make every parameter of a meta model a DTensor over `mesh`, a mesh of one axis.

    Raises UnsupportedError for a model without a plan or with a style that is unknown here, UsageError when its heads
    can't be shared evenly.
    """
    _check_heads(model, mesh.size())
    names = _styles_by_module(model, mesh.size(), ties)
    for module_name, style_name in names.items():
        style = _style(style_name)
        if style is None:
            raise UnsupportedError(
                f"--tp: this trainer can't do what transformers' plan for {type(model).__name__} wants for "
                f"{module_name}: {style_name!r}",
                hint="train without --tp",
            )
        parallelize_module(model.get_submodule(module_name), mesh, style)


def _styles_by_module(model: PreTrainedModel, size: int, ties: dict[str, str]) -> dict[str, str]:
    """A style for every module that has parameters of its own."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no tensor-parallel plan for {type(model).__name__}",
            hint="train without --tp",
        )
    names = {}
    for name, module in model.named_modules():
        own = [name, *(f"{name}.{key}" for key, _ in module.named_parameters(recurse=False))]
        if len(own) > 1:
            names[name] = next((s for key in own for pattern, s in plan.items() if _matches(pattern, key)), "replicate")
    # Both ends of a tie must be split alike: a vocabulary that the head splits, the embedding splits too.
    for alias, canonical in ties.items():
        head, embedding = (key.rpartition(".")[0] for key in (alias, canonical))
        if names.get(head, "").startswith("colwise") and names.get(embedding) == "replicate":
            names[embedding] = "embedding_rowwise"
        if _num_rows(model, embedding) % size:
            names[head] = names[embedding] = "replicate"
    for name, style in names.items():
        if style in _GATHERED and _num_rows(model, name) % size:
            names[name] = "replicate"
    return names


def _num_rows(model: PreTrainedModel, module_name: str) -> int:
    return cast(torch.Tensor, model.get_submodule(module_name).weight).shape[0]


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _check_heads(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, field, None)
        if isinstance(number, int) and number % size:
            raise UsageError(f"--tp {size} doesn't divide the model's {field}, {number}", hint="another --tp, or none")
