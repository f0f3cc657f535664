"""A transformers model on the meta device: its names, shapes, ties and dtype rules, without a byte of weights."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from ckptool.core.config_limits import check_config
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.storage.files import read_json

#: Keys under which a config can say that its weights are quantised.
_QUANTIZATION_KEY = "quantization_config"


def read_config(folder: Path, num_tensors: int, num_bytes: int, dequantised: bool = False) -> dict[str, Any] | None:
    """The folder's config.json, or None when there is none. `num_tensors` and `num_bytes` are the weights'.

    Raises DamagedError when it can't be the config of such weights, UnsupportedError for quantised ones unless they are
    `dequantised` while they are read. What it returns, or build_meta_model makes of it, is as large as the weights
    allow.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    config = read_json(path, max_bytes=16 << 20)
    if not isinstance(config, dict):
        raise DamagedError(f"{path} is not a JSON object")
    check_config(config, str(path), num_tensors=num_tensors, num_bytes=num_bytes)
    quantization = config.get(_QUANTIZATION_KEY)
    if quantization and not dequantised:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise UnsupportedError(
            f"{folder}: weights quantised with {str(method)[:100]!r} can't be used here as they are",
            hint="use the model's unquantised checkpoint",
        )
    return config


def is_custom_code(config: dict[str, Any]) -> bool:
    """True when only the repository's own code knows the model; such code is never run."""
    return "auto_map" in config and config.get("model_type") not in transformers.CONFIG_MAPPING


def build_meta_model(folder: Path, dtype: str | None = None) -> transformers.PreTrainedModel:
    """The model of `folder`'s config on the meta device, in `dtype` where a cast is wanted.

    The config must have passed `read_config`. Raises UnsupportedError when this transformers doesn't know the
    architecture.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a strange config makes transformers raise nearly anything
        raise UnsupportedError(
            f"{folder}: transformers {transformers.__version__} can't read its config: {_first_line(error)}",
            hint="pip install -U transformers",
        ) from error
    return build_from_config(config, str(folder), dtype)


def build_from_config(
    config: transformers.PreTrainedConfig, location: str, dtype: str | None = None
) -> transformers.PreTrainedModel:
    """The model of a config on the meta device; `location` names it in errors. Raises UnsupportedError."""
    model_class = _model_class(location, config)
    # Attention kernels are irrelevant here, and some can't be had on every machine.
    config._attn_implementation = "eager"
    if hasattr(config, _QUANTIZATION_KEY):
        delattr(config, _QUANTIZATION_KEY)
    torch_dtype = getattr(torch, dtype) if dtype else torch.float32
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch_dtype)
    except Exception as error:
        raise UnsupportedError(f"{location}: can't build {model_class.__name__}: {_first_line(error)}") from error
    if not hasattr(model, "all_tied_weights_keys"):
        raise UnsupportedError(f"{location}: {model_class.__name__} does not say what it ties")
    return model


def relatives(model: transformers.PreTrainedModel) -> list[transformers.PreTrainedModel]:
    """The model that is pretrained with this config and the bare one, on meta: what they have beyond `model` (a pooler,
    a head for another task) may lie in the same files."""
    classes: set[Any] = {
        _mapped(auto, model.config) for auto in (transformers.AutoModelForPreTraining, transformers.AutoModel)
    } - {type(model)}
    with torch.device("meta"):
        return [found._from_config(model.config) for found in classes if _is_model_class(found)]


class DtypeRule:
    """Which dtype `from_pretrained(dtype=dtype)` gives each tensor of a model built by `build_meta_model(_, dtype)`:
    float32 where the model demands it, `dtype` elsewhere. With dtype None every tensor keeps its own."""

    def __init__(self, model: transformers.PreTrainedModel, dtype: str | None) -> None:
        pinned: set[str] = set()
        if dtype in ("float16", "bfloat16"):
            pinned |= set(model._keep_in_fp32_modules_strict or ())
        if dtype == "float16":
            pinned |= set(model._keep_in_fp32_modules or ())
        self._pinned = [re.compile(pattern.replace("*", ".*")) for pattern in sorted(pinned)]
        self._built = {n: str(t.dtype).removeprefix("torch.") for n, t in model.state_dict().items()} if dtype else {}

    def of(self, name: str) -> str | None:
        """The dtype to cast the live tensor `name` to; None to keep what is stored."""
        if name in self._built and any(pattern.search(name) for pattern in self._pinned):
            return "float32"
        return self._built.get(name)


def _model_class(location: str, config: Any) -> Any:
    for architecture in config.architectures or []:
        model_class = _named_class(architecture, config)
        if _is_model_class(model_class):
            return model_class
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if (mapped := _mapped(auto, config)) is not None:
            return mapped
    raise UnsupportedError(
        f"{location}: transformers {transformers.__version__} has no model for {config.model_type!r} "
        f"(architectures {config.architectures})",
        hint="pip install -U transformers",
    )


def _named_class(name: Any, config: Any) -> Any:
    """What transformers calls so: at the top, or, of parts of models that are saved alone, beside their config."""
    if not isinstance(name, str):
        return None
    if (found := getattr(transformers, name, None)) is not None:
        return found
    beside = type(config).__module__.replace(".configuration_", ".modeling_")
    if not beside.startswith("transformers.models."):
        return None
    try:
        return getattr(importlib.import_module(beside), name, None)
    except ImportError:
        return None


def _mapped(auto: Any, config: Any) -> Any:
    """The class that an auto class has for a config; None when it has none, or names one that transformers lacks."""
    try:
        return auto._model_mapping.get(type(config), None)
    except ValueError:
        return None


def _is_model_class(found: Any) -> bool:
    """True for the class of a model, rather than whatever else of the library a config may name."""
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and bool(found.config_class)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
