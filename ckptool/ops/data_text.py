"""The text of units: tokens of the trainer's cache, which lies beside the checkpoints, decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptool.core.data_source import DataSource
from ckptool.core.position import DataPosition
from ckptool.core.segment import Unit
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.unit_layout import UnitLayout

CACHE_FOLDER = ".data-cache"
_RECORD_FILE = "tokens.json"


def unit_texts(checkpoint: Path, position: DataPosition, units: Sequence[Unit]) -> list[str]:
    """The text of each unit, units of the present definition; in a packed row, its documents one after the other.

    Raises UnsupportedError without the cache of their tokens, or without a tokenizer, and for streams, whose text
    nobody knows before it is read; DamagedError when the cache is short.
    """
    from tokenizers import Tokenizer

    file = checkpoint / "hf" / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(f"{checkpoint} has no hf/tokenizer.json, so its units can't be read as text")
    tokenizer = Tokenizer.from_file(str(file))
    seq_len = position.segment.seq_len
    names = {unit.source for unit in units}
    read = {s.name: _UnitTokens(checkpoint.parent, s, seq_len) for s in position.segment.sources if s.name in names}
    return [tokenizer.decode(read[unit.source].of(unit.index), skip_special_tokens=False) for unit in units]


class _UnitTokens:
    """The tokens of a source's units."""

    def __init__(self, root: Path, source: DataSource, seq_len: int) -> None:
        if source.fingerprint.get("kind") in ("stream", "loader"):
            raise UnsupportedError(f"{source.name} is read while training, so the text that comes next is not known")
        self._folder, self._record = _find_cache(root, source)
        self._seq_len = seq_len
        self._layout = None if source.unit_kind == "window" else UnitLayout(self._folder, source.unit_kind, seq_len)

    def of(self, index: int) -> list[int]:
        if self._layout is None:
            return self._read(index * self._seq_len, self._seq_len)
        # A document's last token is only a label. With it, an end of text can be seen; a cut one has none.
        stretches = self._layout.stretches(index)
        return [t for start, size in stretches for t in self._read(start, size + (size < self._seq_len))]

    def _read(self, start: int, num_tokens: int) -> list[int]:
        tokens: list[int] = []
        end, part_start = start + num_tokens, 0
        for path, dtype, offset_bytes, count in self._parts():
            first, last = max(start - part_start, 0), min(end - part_start, count)
            if first < last:
                if not path.is_file() or path.stat().st_size < offset_bytes + count * np.dtype(dtype).itemsize:
                    raise DamagedError(f"{path} should hold {count} tokens", hint=f"rm -r {self._folder}")
                tokens += np.memmap(path, dtype, "r", offset_bytes, (count,))[first:last].tolist()
            part_start += count
        return tokens

    def _parts(self) -> Iterator[tuple[Path, str, int, int]]:
        """Files of tokens in order: path, dtype, first byte, number of tokens."""
        for name, count in self._record.get("pieces", ()):
            yield self._folder / f"{name}.tokens", self._record["dtype"], 0, count
        for path, dtype, offset_bytes, count in self._record.get("files", ()):
            yield Path(path), dtype, offset_bytes, count


def _find_cache(root: Path, source: DataSource) -> tuple[Path, dict[str, Any]]:
    """The cache of just these tokens, whichever files they came from."""
    for file in sorted((root / CACHE_FOLDER).glob(f"*/{_RECORD_FILE}")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            is_same = record["fingerprint"]["tokens"] == source.fingerprint.get("tokens")
            if is_same and ("pieces" in record or "files" in record):
                return file.parent, record
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a cache that can't be read is none
    raise UnsupportedError(
        f"the tokens of {source.name} are not in {root / CACHE_FOLDER}", hint="the trainer puts them there"
    )
