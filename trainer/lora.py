"""LoRA: the model's weights are frozen, and beside each chosen layer two thin matrices are trained.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. The layers are peft's. A checkpoint then holds the thin matrices only,
under peft's names (`model.layers.0.self_attn.q_proj.lora_A.weight`), and its provenance names the base.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import ckptool
from ckptool import MismatchError, Place, UnsupportedError, UsageError
from trainer.config import ALL_LINEAR, TrainConfig
from trainer.model import named_parameters

_NAMES = (".lora_A.weight", ".lora_B.weight")


#: What peft's settings say of layers that differ from the others: in rank, in alpha, in what alpha is divided by.
_UNEVEN = ("rank_pattern", "alpha_pattern", "use_rslora")


@dataclass(frozen=True)
class Adapter:
    """Two matrices of `rank` rows or columns beside each layer in `targets`; the product is scaled by alpha / rank.

    `imported` is not empty for an adapter of peft's with settings in `_UNEVEN`: all that its own config says.
    """

    rank: int
    alpha: float
    targets: str
    imported: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainConfig, stored: Mapping[str, Any]) -> Adapter | None:
        """What the options ask for, to go on with what is `stored`; None when all weights are to be trained."""
        if not config.lora_rank:
            return None
        theirs = stored.get("config", {})
        imported = theirs if any(theirs.get(key) for key in _UNEVEN) else {}
        return cls(config.lora_rank, config.lora_alpha or 2.0 * config.lora_rank, config.lora_targets, imported)

    def record(self, base: Place) -> dict[str, Any]:
        """What a checkpoint's provenance says of it: the numbers, and which weights it belongs to."""
        return {
            **{"type": "lora", "rank": self.rank, "alpha": self.alpha, "targets": self.targets},
            **({"config": dict(self.imported)} if self.imported else {}),
            **{"base": base.name, "base_digest": ckptool.weights_digest(base)},
        }

    def check_same(self, stored: dict[str, Any], where: Place) -> None:
        """Raises MismatchError when the adapter that `where` holds is another one."""
        told: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha}
        if "config" not in stored:  # peft's own says in other words which layers they are
            told["targets"] = self.targets
        changes = [f"{name} {stored.get(name)} -> {value}" for name, value in told.items() if stored.get(name) != value]
        if changes:
            raise MismatchError(
                f"the adapter in {where} is another one: {'; '.join(changes)}",
                hint=f"--lora-rank {stored.get('rank')} --lora-alpha {stored.get('alpha')} "
                f"--lora-targets {stored.get('targets')}",
            )

    def check_base(self, stored: dict[str, Any], base: Place) -> None:
        """Raises MismatchError when `base` holds other weights than those that the adapter was trained on."""
        if stored.get("base_digest") != ckptool.weights_digest(base):
            raise MismatchError(
                f"{base} is not what the adapter was trained on: the weights of {stored.get('base')} were others",
                hint="--init-from names the base",
            )


def is_adapter_name(name: str) -> bool:
    """True for the checkpoint name of a matrix of an adapter."""
    return name.endswith(_NAMES)


def add_adapter(model: PreTrainedModel, adapter: Adapter, dtype: torch.dtype) -> None:
    """Freeze a meta model and put an adapter of `dtype` beside the layers that it names.

    Raises UsageError when a name fits no layer, or one that is no linear layer inside of a block.
    """
    try:
        import peft
        from peft.tuners.lora import Linear, LoraLayer
    except ImportError as error:
        raise UnsupportedError("--lora-rank needs peft", hint="pip install 'ckptool[lora]'") from error
    if adapter.targets == ALL_LINEAR:
        targets = _linear_layers(model)  # peft's own list has the experts of mixtures too, which are none
    else:
        targets = [name.strip() for name in adapter.targets.split(",")]
        last_words = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        strangers = [name for name in targets if name.rpartition(".")[2] not in last_words]
        if strangers:
            raise UsageError(f"--lora-targets: {type(model).__name__} has no layer {', '.join(strangers)}")
    settings = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # peft only divides by the rank
        target_modules=targets,
        task_type="CAUSAL_LM",
        **{key: adapter.imported[key] for key in _UNEVEN if adapter.imported.get(key)},
    )
    try:
        peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UsageError(f"--lora-targets {adapter.targets}: {str(error).splitlines()[0]}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and (not isinstance(module, Linear) or module in ends):
            raise UsageError(
                f"--lora-targets {adapter.targets}: {name} is no linear layer inside of a block",
                hint="embeddings and output head can't have an adapter here",
            )
    for name, parameter in named_parameters(model).items():
        if is_adapter_name(name):
            parameter.data = parameter.data.to(dtype)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Every linear layer but the output head; GPT-2's are of a class of their own."""
    head = model.get_output_embeddings()
    linear = (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, linear) and module is not head]


def init_adapter(model: PreTrainedModel, seed: int) -> None:
    """Begin as peft does: A uniform within 1 / sqrt(its inputs), B zero, so that the model is the base.

    Values are a function of seed and name: the same on any mesh.
    """
    for name, parameter in named_parameters(model).items():
        if not is_adapter_name(name):
            continue
        whole = torch.zeros(parameter.shape)
        if name.endswith(_NAMES[0]):
            key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            bound = 1 / math.sqrt(parameter.shape[1])
            whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(key)))
        with torch.no_grad():
            _fill(parameter, whole)


def _fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mesh = parameter.device_mesh
    part = distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())
