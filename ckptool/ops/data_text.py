"""The text of units: windows of the trainer's token cache, which lies beside the checkpoints, decoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.core.segment import Unit
from ckptool.errors import DamagedError, UnsupportedError

CACHE_FOLDER = ".data-cache"
_RECORD_FILE = "tokens.json"


def unit_texts(checkpoint: Path, position: DataPosition, units: Sequence[Unit]) -> list[str]:
    """The text of each unit, units of the present definition.

    Raises UnsupportedError for units that are no windows, without the cache of their tokens, or without a tokenizer;
    DamagedError when the cache is short.
    """
    from tokenizers import Tokenizer

    file = checkpoint / "hf" / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(f"{checkpoint} has no hf/tokenizer.json, so its units can't be read as text")
    tokenizer = Tokenizer.from_file(str(file))
    sources = {source.name: source for source in position.segment.sources}
    seq_len = position.segment.seq_len
    texts = []
    for unit in units:
        tokens = _read_window(checkpoint.parent, sources[unit.source], unit.index * seq_len, seq_len)
        texts.append(tokenizer.decode(tokens, skip_special_tokens=False))
    return texts


def _read_window(root: Path, source: DataSource, start: int, num_tokens: int) -> list[int]:
    import numpy as np

    if source.unit_kind != "window":
        raise UnsupportedError(f"{source.name}: text is shown of windows only, not of units of kind {source.unit_kind}")
    folder, record = _find_cache(root, source)
    tokens: list[int] = []
    end, piece_start = start + num_tokens, 0
    for name, count in record["pieces"]:
        first, last = max(start - piece_start, 0), min(end - piece_start, count)
        if first < last:
            path = folder / f"{name}.tokens"
            if path.stat().st_size != count * np.dtype(record["dtype"]).itemsize:
                raise DamagedError(f"{path} should hold {count} tokens", hint=f"rm -r {folder}", kind="truncated")
            tokens += np.memmap(path, record["dtype"], "r", shape=(count,))[first:last].tolist()
        piece_start += count
    return tokens


def _find_cache(root: Path, source: DataSource) -> tuple[Path, dict[str, Any]]:
    """The cache of just these tokens, whichever files they came from."""
    for file in sorted((root / CACHE_FOLDER).glob(f"*/{_RECORD_FILE}")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["fingerprint"]["tokens"] == source.fingerprint.get("tokens") and "pieces" in record:
                return file.parent, record
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a cache that can't be read is none
    raise UnsupportedError(
        f"the tokens of {source.name} are not in {root / CACHE_FOLDER}", hint="the trainer puts them there"
    )
