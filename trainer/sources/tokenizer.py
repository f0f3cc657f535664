"""The tokenizer of a checkpoint's `hf/` folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import UnsupportedError

_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    "chat_template*",
)


def load_tokenizer(hf_folder: Path) -> Any:
    """Raises UnsupportedError when there is none, or one without an end-of-text token."""
    import transformers

    if not any(path.is_file() for pattern in _FILES for path in hf_folder.glob(pattern)):
        raise UnsupportedError(
            f"{hf_folder} holds no tokenizer", hint="ckptool import-hf takes it along from a folder that has one"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            hf_folder, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"no usable tokenizer in {hf_folder}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise UnsupportedError(f"the tokenizer in {hf_folder} has no end-of-text token to put between documents")
    return tokenizer


def token_dtype(tokenizer: Any) -> np.dtype:
    """The smallest dtype that token files use and that holds every token id."""
    return np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")


def tokenizer_digest(hf_folder: Path) -> str:
    """Over the names and the contents of the tokenizer's files."""
    found = {path for pattern in _FILES for path in hf_folder.glob(pattern) if path.is_file()}
    content = b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(found))
    return hashlib.blake2b(content, digest_size=16).hexdigest()
