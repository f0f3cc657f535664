"""Tokens that somebody else's tools have written: raw arrays, .npy, llm.c's header, Megatron's .bin and .idx.

Layouts, from the programs that write them:
- raw: unsigned integers and nothing else, as nanoGPT's `prepare.py` and OLMo do (OLMo calls such files `.npy`);
- .npy: numpy's own format, one dim;
- llm.c: 256 int32, of which the first three are 20240520, version 1 and the number of uint16 tokens after them;
- Megatron .idx: 9 bytes `MMIDIDX`, 0, 0; uint64 version 1; uint8 dtype code; uint64 number of sequences n; uint64
  length d of the document index; int32[n] tokens of each sequence; int64[n] their byte offsets in the .bin; int64[d]
  the first sequence of each document, with n at the end. Little-endian, as all of these.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ckptool import DamagedError, NotFoundError, SourceFile, UnsupportedError
from trainer.sources.stream import TokenPart, TokenStream, blocks

_LLMC_MAGIC, _LLMC_HEADER_BYTES = 20240520, 1024
_MEGATRON_MAGIC, _MEGATRON_HEADER_BYTES = b"MMIDIDX\x00\x00", 34
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def token_part(path: Path, raw_dtype: np.dtype) -> TokenPart:
    """Where the tokens of a file lie; `raw_dtype` is that of a file without a header.

    Raises DamagedError for a header that doesn't fit, or a size that is no whole number of tokens.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(12)
    if head.startswith(b"\x93NUMPY"):
        return _npy_part(path)
    if len(head) == 12 and np.frombuffer(head, "<i4")[0] == _LLMC_MAGIC:
        version, num_tokens = (int(n) for n in np.frombuffer(head, "<i4")[1:])
        if version != 1:
            raise UnsupportedError(f"{path}: llm.c token file of version {version}, only 1 is known")
        if size != _LLMC_HEADER_BYTES + 2 * num_tokens:
            raise DamagedError(f"{path}: its header says {num_tokens} tokens, its size another number")
        return TokenPart(path, "uint16", _LLMC_HEADER_BYTES, num_tokens)
    if size % raw_dtype.itemsize or not size:
        raise DamagedError(f"{path}: {size} bytes are no whole number of {raw_dtype} tokens", hint="dtype = ...")
    return TokenPart(path, raw_dtype.name, 0, size // raw_dtype.itemsize)


def _npy_part(path: Path) -> TokenPart:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise DamagedError(f"{path}: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or not isinstance(array, np.memmap) or not len(array):
        raise DamagedError(f"{path}: should be one row of integers, is {array.dtype} of shape {array.shape}")
    return TokenPart(path, array.dtype.str, array.offset, len(array))


def megatron_files(prefix: str) -> list[SourceFile]:
    """The .idx and the .bin of a Megatron data set. Raises NotFoundError when one is missing."""
    path = Path(prefix).expanduser()
    base = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    files = [base.with_name(base.name + suffix) for suffix in (".idx", ".bin")]
    for file in files:
        if not file.is_file():
            raise NotFoundError(f"no file {file}; a Megatron data set is a .bin and an .idx of one name")
    return [SourceFile(file, file.suffix) for file in files]


def megatron_part(index: Path, data: Path) -> tuple[TokenPart, np.ndarray]:
    """Where the tokens lie, and the tokens of each document (int64).

    Raises DamagedError when index and data don't fit together, UnsupportedError for sequences that don't follow each
    other in the .bin.
    """
    size = index.stat().st_size
    with index.open("rb") as stream:
        head = stream.read(_MEGATRON_HEADER_BYTES)
    if len(head) < _MEGATRON_HEADER_BYTES or not head.startswith(_MEGATRON_MAGIC):
        raise DamagedError(f"{index}: not a Megatron index")
    version = int.from_bytes(head[9:17], "little")
    num_sequences, num_bounds = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
    if version != 1 or head[17] not in _MEGATRON_DTYPES:
        raise UnsupportedError(f"{index}: version {version} with dtype code {head[17]} is not known")
    if size < _MEGATRON_HEADER_BYTES + 12 * num_sequences + 8 * num_bounds:
        raise DamagedError(f"{index}: shorter than its {num_sequences} sequences", kind="truncated")
    dtype = np.dtype(_MEGATRON_DTYPES[head[17]])
    content = np.memmap(index, np.uint8, "r", _MEGATRON_HEADER_BYTES)
    lengths = content[: 4 * num_sequences].view("<i4").astype(np.int64)
    offsets = np.frombuffer(content[4 * num_sequences : 12 * num_sequences].tobytes(), "<i8")
    bounds = np.frombuffer(content[12 * num_sequences : 12 * num_sequences + 8 * num_bounds].tobytes(), "<i8")
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
        raise UnsupportedError(f"{index}: its sequences don't follow each other in {data.name}")
    num_tokens = int(ends[-1]) if num_sequences else 0
    if data.stat().st_size != num_tokens * dtype.itemsize or not num_tokens:
        raise DamagedError(f"{data}: should hold {num_tokens} {dtype} tokens by its index", kind="truncated")
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise DamagedError(f"{index}: its documents don't cover its sequences")
    starts = np.concatenate([[0], ends])[bounds]
    return TokenPart(data, dtype.name, 0, num_tokens), np.diff(starts)


def scan_documents(stream: TokenStream, vocab_size: int, end_of_text: int, name: str) -> np.ndarray:
    """The tokens of each document (int64): a document ends with the end-of-text token, or with the data.

    Raises DamagedError for a token that the tokenizer doesn't have.
    """
    ends: list[np.ndarray] = []
    for start, block in blocks(stream):
        wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(wrong):
            raise DamagedError(
                f"{name}: token {start + wrong[0]} is {block[wrong[0]]}, but the tokenizer has {vocab_size}",
                hint="made with another tokenizer, or dtype = ... is another one",
            )
        ends.append(np.flatnonzero(block == end_of_text) + start + 1)
    bounds = np.concatenate([np.zeros(1, np.int64), *ends])
    if bounds[-1] != len(stream):
        bounds = np.append(bounds, len(stream))
    return np.diff(bounds)
