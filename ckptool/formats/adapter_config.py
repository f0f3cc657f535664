"""`adapter_config.json` of a LoRA adapter, as peft writes it: what of it is understood, and how much each layer counts.

Source: LoraConfig in peft/tuners/lora/config.py, and how patterns are matched in peft/utils/other.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import DamagedError, MismatchError, UnsupportedError, name_some

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

#: Settings that choose layers, describe the training or say where the adapter comes from: the tensors tell the rest.
_HARMLESS = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    *("eva_config", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
)

#: Ways to begin that leave the base's weights as they are. Others (pissa, olora, loftq, ...) take a part out of them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """Rank and alpha of most layers, and of those that patterns (module names, or regular expressions) speak of."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, record: Any, where: str) -> AdapterConfig:
        """Raises UnsupportedError, naming the settings, for anything but LoRA with plain matrices on the base as it is;
        DamagedError for values of another type."""
        if not isinstance(record, dict) or "peft_type" not in record:
            raise DamagedError(f"{where}: not a configuration of peft")
        if record["peft_type"] != "LORA":
            raise UnsupportedError(f"{where}: an adapter of the kind {record['peft_type']}; only LORA is understood")
        begun = record.get("init_lora_weights")
        if begun not in _PLAIN_BEGINNINGS:
            raise UnsupportedError(
                f"{where}: init_lora_weights {begun!r} changes the base's weights, so this adapter is not for the base "
                "as it is",
                hint="peft's save_pretrained(..., path_initial_model_for_weight_conversion=...) makes a plain one",
            )
        strange = [f"{key} {value!r}" for key, value in record.items() if key not in _HARMLESS and not _is_off(value)]
        if strange:
            raise UnsupportedError(f"{where}: only plain LoRA on linear layers is understood, not {name_some(strange)}")
        try:
            config = cls(
                int(record["r"]),
                float(record["lora_alpha"]),
                {key: int(value) for key, value in (record.get("rank_pattern") or {}).items()},
                {key: float(value) for key, value in (record.get("alpha_pattern") or {}).items()},
                bool(record.get("use_rslora")),
                record,
            )
            for pattern in (*config.rank_pattern, *config.alpha_pattern):
                re.compile(pattern)
        except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
            raise DamagedError(f"{where}: r, lora_alpha or their patterns are not numbers by name: {error}") from error
        return config

    @property
    def targets(self) -> str:
        """The layers, as peft and `--lora-targets` name them."""
        targets = self.record.get("target_modules") or ""
        return targets if isinstance(targets, str) else ",".join(sorted(map(str, targets)))

    def scale(self, module: str, rank: int) -> float:
        """What the product of a layer's matrices is multiplied by: alpha / rank, or alpha / sqrt(rank).

        Raises MismatchError when the matrices are of another rank than is said here.
        """
        said = _of(self.rank_pattern, module, self.rank)
        if rank != said:
            raise MismatchError(f"{CONFIG_NAME} says rank {said}, and that of {module} is {rank}")
        return _of(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def to_bytes(self) -> bytes:
        """As peft writes it."""
        return json.dumps(self.record, indent=2, sort_keys=True).encode()


def _is_off(value: Any) -> bool:
    return value in (None, False, "none", [], {})


def _of(pattern: Mapping[str, Any], module: str, usual: Any) -> Any:
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), usual)
