"""The parts of an exported config.json that must agree with the tensors beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptool.core.dtypes import CASTABLE
from ckptool.core.tensors import TensorEntry
from ckptool.storage.files import Place, read_json, write_json

CONFIG_NAME = "config.json"
QUANTIZATION_KEY = "quantization_config"

_DTYPE_KEYS = ("dtype", "torch_dtype")
_TIE_KEY = "tie_word_embeddings"


def main_dtype(entries: Iterable[TensorEntry]) -> str | None:
    """The float dtype that holds most elements; None without float tensors."""
    counts: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in CASTABLE:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_elements
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def quantisation_of(folder: Place) -> Any:
    """What `folder/config.json` says of its weights' quantisation; None when it says nothing."""
    path = folder / CONFIG_NAME
    config = read_json(path, max_bytes=16 << 20) if path.exists() else None
    return config.get(QUANTIZATION_KEY) if isinstance(config, dict) else None


def weights_dtype(folder: Path) -> str:
    """The dtype that dequantised weights get: the config's, bfloat16 when it names none that a model can train in."""
    config = read_json(folder / CONFIG_NAME, max_bytes=16 << 20)
    named = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), "")
    dtype = named.removeprefix("torch.")
    return dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16"


def drop_quantisation(folder: Path, dtype: str) -> None:
    """Make `folder/config.json` say that the weights are plain ones of `dtype`."""
    path = folder / CONFIG_NAME
    config = read_json(path)
    config.pop(QUANTIZATION_KEY, None)
    _set_dtype(config, dtype)
    write_json(path, config)


def match_config(folder: Path, dtype: str | None, source_dtype: str | None, untied: bool) -> list[str]:
    """Make `folder/config.json` say what the tensors are; the file stays byte for byte where nothing changed.

    `dtype` is the tensors' main dtype, `source_dtype` what it was in the checkpoint's own source: only a change since
    then is written. `untied` clears the tie flag. Returns notes on what was changed.
    """
    path = folder / CONFIG_NAME
    if not path.exists():
        return []
    config = read_json(path)
    notes: list[str] = []
    if dtype and dtype != source_dtype and _set_dtype(config, dtype):
        notes.append(f"config.json: dtype is now {dtype}")
    if untied and _clear_ties(config):
        notes.append(f"config.json: {_TIE_KEY} is now false")
    if notes:
        write_json(path, config)
    return notes


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Set every dtype key, sub-configs included; add one when there is none. True when anything changed."""
    changed = False
    for part in (config, *[value for value in config.values() if isinstance(value, dict)]):
        for key in _DTYPE_KEYS:
            if isinstance(part.get(key), str) and part[key] != dtype:
                part[key] = dtype
                changed = True
    if not any(key in config for key in _DTYPE_KEYS):
        config["dtype"] = dtype
        changed = True
    return changed


def _clear_ties(config: dict[str, Any]) -> bool:
    before = config.get(_TIE_KEY)
    config[_TIE_KEY] = False
    for part in config.values():
        if isinstance(part, dict) and part.get(_TIE_KEY):
            part[_TIE_KEY] = False
    return before is not False
