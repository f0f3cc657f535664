"""Corpus: a source as documents of tokens on the disk, made once and kept under the root."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import DamagedError, SourceFile, UnsupportedError, files_record, find_source_files
from trainer.sources.chat import check_chat
from trainer.sources.documents import Table, check_text, file_tables, hub_table
from trainer.sources.spec import SourceSpec
from trainer.sources.stream import TokenPart, TokenStream
from trainer.sources.token_cache import Piece, Recipe, cut_into_pieces, make_pieces, sole_builder
from trainer.sources.token_files import fsync_folder, megatron_files, megatron_part, token_part
from trainer.sources.tokenizer import load_tokenizer, token_dtype, tokenizer_digest

Say = Callable[[str], None]

#: Part of the key of a cache: another number for other tokens from the same files.
CACHE_VERSION = 2
_BLOCK_TOKENS = 1 << 24


@dataclass(frozen=True)
class Corpus:
    """Documents one after the other. `folder` is the cache; `masks` holds a byte for each token, or is empty.

    Equal fingerprints mean equal tokens, documents and masks.
    """

    name: str
    folder: Path
    parts: tuple[TokenPart, ...]
    masks: tuple[TokenPart, ...]
    num_tokens: int
    num_documents: int
    fingerprint: dict[str, str | int]

    def tokens(self) -> TokenStream:
        return TokenStream(self.parts)

    def trained(self) -> TokenStream | None:
        """For each token 1 when it is trained as a label; None when all are."""
        return TokenStream(self.masks) if self.masks else None

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document: int64, mapped."""
        return np.load(self.folder / "lengths.npy", mmap_mode="r")


def open_corpus(spec: SourceSpec, hf_folder: Path, root: Path, say: Say) -> Corpus:
    """The documents of a source, from the cache under `root` when these very files were read before.

    Raises NotFoundError when a path leads to no file, DamagedError when a file can't be read as what it is,
    UnsupportedError for a tokenizer that can't serve.
    """
    if spec.kind in ("tokens", "megatron"):
        return _open_token_files(spec, hf_folder, root, say)
    table = hub_table(spec) if spec.kind == "hf" else None
    files = _table_files(table) if table is not None else find_source_files(spec.kind, spec.paths)
    files_of = files_record(files)
    field = {} if spec.kind == "chat" else {"field": spec.field}
    source = {"kind": spec.kind, **field, **files_of, "tokenizer": tokenizer_digest(hf_folder)}
    folder = _cache_folder(root, source)
    if not folder.is_dir():
        say(f"tokenizing {spec.name}: {len(files)} files, {int(files_of['num_bytes']) / 1e6:.1f} MB, once")
        with sole_builder(folder, say) as staging:
            if not folder.is_dir():
                _tokenize(spec, files, table, hf_folder, staging, say)
                _publish(staging, folder)
    record = _read_record(folder)
    if table is not None:
        # The Arrow files of a data set differ between versions of `datasets`: the tokens are its identity.
        source = {key: value for key, value in source.items() if key not in files_of} | {"num_rows": len(table.rows)}
    return Corpus(
        spec.name,
        folder,
        _stored_parts(folder, record, ".tokens", record["dtype"]),
        _stored_parts(folder, record, ".trained", "uint8") if spec.kind == "chat" else (),
        record["num_tokens"],
        record["num_documents"],
        {**source, **record["fingerprint"]},
    )


def _tokenize(
    spec: SourceSpec, files: list[SourceFile], table: Table | None, hf_folder: Path, staging: Path, say: Say
) -> None:
    tokenizer = load_tokenizer(hf_folder)
    staging.mkdir(exist_ok=True)
    tables = (table,) if table is not None else tuple(file_tables(spec, files, staging / "datasets"))
    for each in tables:
        if spec.kind == "chat":
            check_chat(tokenizer, each)
        else:
            check_text(each, spec.field)
    pieces = cut_into_pieces(tables, staging)
    make_pieces(Recipe(spec.kind, spec.field, hf_folder, tables), pieces, say)
    _gather(pieces, spec.kind == "chat", token_dtype(tokenizer), staging)
    shutil.rmtree(staging / "datasets", ignore_errors=True)


def _gather(pieces: list[Piece], has_masks: bool, dtype: np.dtype, staging: Path) -> None:
    """Write what is known of all pieces together. Raises DamagedError when a piece is not what its lengths say."""
    lengths = [np.fromfile(piece.stem.with_suffix(".lengths"), np.int64) for piece in pieces]
    names = [piece.stem.name for piece in pieces]
    counts = [int(each.sum()) for each in lengths]
    parts = [TokenPart(staging / f"{n}.tokens", dtype.name, 0, c) for n, c in zip(names, counts, strict=True)]
    masks = [TokenPart(staging / f"{n}.trained", "uint8", 0, c) for n, c in zip(names, counts, strict=True)]
    everything = np.concatenate([np.empty(0, np.int64), *lengths])
    fingerprint = {"tokens": _content_digest(TokenStream(parts))}
    if has_masks:
        fingerprint["trained"] = _content_digest(TokenStream(masks))
    _write_record(
        staging, everything, fingerprint, {"dtype": dtype.name, "pieces": list(zip(names, counts, strict=True))}
    )


def _open_token_files(spec: SourceSpec, hf_folder: Path, root: Path, say: Say) -> Corpus:
    tokenizer = load_tokenizer(hf_folder)
    lengths: np.ndarray | None = None
    if spec.kind == "megatron":
        files = megatron_files(spec.paths[0])
        part, lengths = megatron_part(files[0].path, files[1].path)
        parts = [part]
    else:
        files = find_source_files("tokens", spec.paths)
        raw_dtype = _raw_dtype(spec, tokenizer)
        parts = [token_part(file.path, raw_dtype) for file in files]
    layout = ",".join(sorted({np.dtype(part.dtype).name for part in parts}))
    source = {
        "kind": spec.kind,
        "dtype": layout,
        **files_record(files, sampled=True),
        "tokenizer": tokenizer_digest(hf_folder),
    }
    folder = _cache_folder(root, source)
    if not folder.is_dir():
        say(f"reading {spec.name} once: {int(source['num_bytes']) / 1e6:.1f} MB of tokens")
        with sole_builder(folder, say) as staging:
            if not folder.is_dir():
                staging.mkdir(exist_ok=True)
                stream = TokenStream(parts)
                found = _scan(stream, len(tokenizer), tokenizer.eos_token_id, spec.name)
                fingerprint = {"tokens": _content_digest(stream)}
                _write_record(staging, found if lengths is None else lengths, fingerprint, {})
                _publish(staging, folder)
    record = _read_record(folder)
    return Corpus(
        spec.name,
        folder,
        tuple(parts),
        (),
        record["num_tokens"],
        record["num_documents"],
        {**source, **record["fingerprint"]},
    )


def _raw_dtype(spec: SourceSpec, tokenizer: Any) -> np.dtype:
    if spec.dtype not in ("", "uint8", "uint16", "uint32", "int32", "int64", "uint64"):
        raise UnsupportedError(f"{spec.name}: tokens of dtype {spec.dtype!r}", hint="dtype = uint16 or uint32")
    return np.dtype(spec.dtype) if spec.dtype else token_dtype(tokenizer)


def _scan(stream: TokenStream, vocab_size: int, end_of_text: int, name: str) -> np.ndarray:
    """The tokens of each document (int64): a document ends with the end-of-text token, or with the data.

    Raises DamagedError for a token that the tokenizer doesn't have.
    """
    ends: list[np.ndarray] = []
    for start, block in _blocks(stream):
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


def _blocks(stream: TokenStream) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(stream), _BLOCK_TOKENS):
        yield start, stream.read(start, min(start + _BLOCK_TOKENS, len(stream)))


def _content_digest(stream: TokenStream) -> str:
    """Over the values as little-endian uint32: the same tokens in another dtype or other files are the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for _, block in _blocks(stream):
        digest.update(block.astype("<u4").tobytes())
    return digest.hexdigest()


def _table_files(table: Table) -> list[SourceFile]:
    paths = [Path(entry["filename"]) for entry in table.rows.cache_files]
    if not paths:
        raise UnsupportedError(f"{table.where} lies in memory, not in files", hint="save_to_disk it first")
    return [SourceFile(path, path.name) for path in paths]


def _cache_folder(root: Path, source: dict[str, str | int]) -> Path:
    key = json.dumps({**source, "cache_version": CACHE_VERSION}, sort_keys=True)
    return root / ".data-cache" / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _write_record(staging: Path, lengths: np.ndarray, fingerprint: dict[str, str], layout: dict[str, Any]) -> None:
    np.save(staging / "lengths.npy", lengths)
    num_tokens, num_documents = int(lengths.sum()), len(lengths)
    digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=16).hexdigest()
    facts = {"num_tokens": num_tokens, "num_documents": num_documents, "document_lengths": digest}
    record = {
        **layout,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "fingerprint": {**facts, **fingerprint},
    }
    (staging / "tokens.json").write_text(json.dumps(record))


def _publish(staging: Path, folder: Path) -> None:
    """Everything appears under its name at once; an unfinished cache is never read."""
    for name in ("lengths.npy", "tokens.json"):
        with (staging / name).open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(staging)
    os.rename(staging, folder)
    fsync_folder(folder.parent)


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "tokens.json").read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder / 'tokens.json'}: {error}", hint=f"rm -r {folder}") from error


def _stored_parts(folder: Path, record: dict[str, Any], suffix: str, dtype: str) -> tuple[TokenPart, ...]:
    parts = tuple(TokenPart(folder / f"{name}{suffix}", dtype, 0, count) for name, count in record["pieces"])
    for part in parts:
        size = part.path.stat().st_size if part.path.is_file() else -1
        if size != part.num_tokens * np.dtype(dtype).itemsize:
            raise DamagedError(f"{part.path} should hold {part.num_tokens} tokens", hint=f"rm -r {folder}")
    return parts
