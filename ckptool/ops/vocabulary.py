"""Rows that an export would cut off as padding must not be those of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptool.errors import DamagedError, MismatchError, name_some
from ckptool.naming.groups import NamePlan
from ckptool.storage.files import read_json

_TOKENIZER_NAME = "tokenizer.json"
_ADDED_NAME = "added_tokens.json"
_MAX_BYTES = 256 << 20


def check_tokens(names: NamePlan, folder: Path) -> None:
    """Raise MismatchError when the tokenizer in `folder` has tokens in the rows that `names` cuts off."""
    if not names.padded:
        return
    num_kept = min(kept for _, kept in names.padded.values())
    num_tokens = max(_ids(folder), default=-1) + 1
    if num_tokens > num_kept:
        raise MismatchError(
            f"{name_some(list(names.padded))} would be cut to the {num_kept} rows of config.json's vocab_size, and the "
            f"tokenizer has tokens up to {num_tokens - 1}",
            hint=f"make vocab_size in {folder / 'config.json'} the number of rows to keep",
        )


def _ids(folder: Path) -> Iterator[int]:
    """The ids of all tokens that the tokenizer's JSON files list."""
    for name in (_TOKENIZER_NAME, _ADDED_NAME):
        path = folder / name
        record: Any = read_json(path, max_bytes=_MAX_BYTES) if path.is_file() else {}
        if not isinstance(record, dict):
            raise DamagedError(f"{path} is not a JSON object")
        vocabulary: Any = record
        if name == _TOKENIZER_NAME:
            vocabulary = (record.get("model") or {}).get("vocab") or {}
            yield from (token["id"] for token in record.get("added_tokens") or () if type(token.get("id")) is int)
        if isinstance(vocabulary, list):  # of a unigram model: a token's id is its place
            yield len(vocabulary) - 1
        else:
            yield from (number for number in vocabulary.values() if type(number) is int)
