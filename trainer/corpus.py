"""Corpus: a source as documents of tokens on the disk, made once and kept under the root."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import DamagedError, SourceFile, UnsupportedError, files_record, find_source_files
from trainer.os_errors import named_os_errors
from trainer.sources.cache_record import cache_folder, publish, read_record, stored_parts, write_record
from trainer.sources.chat import check_chat
from trainer.sources.documents import Table, check_text, file_tables, hub_table, table_files
from trainer.sources.spec import SourceSpec
from trainer.sources.stream import TokenPart, TokenStream, content_digest, max_token, sample_digest
from trainer.sources.token_cache import Piece, Recipe, cut_into_pieces, make_pieces, sole_builder
from trainer.sources.token_files import megatron_files, megatron_part, scan_documents, token_part
from trainer.sources.tokenizer import load_tokenizer, token_dtype, tokenizer_digest

Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """Documents one after the other. `folder` is the cache; `masks` holds a byte for each token, or is empty.
    `max_token` is None where an older cache doesn't tell.

    Equal fingerprints mean equal tokens, documents and masks.
    """

    name: str
    folder: Path
    parts: tuple[TokenPart, ...]
    masks: tuple[TokenPart, ...]
    num_tokens: int
    num_documents: int
    fingerprint: dict[str, str | int]
    max_token: int | None = None

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
    files = table_files(table) if table is not None else find_source_files(spec.kind, spec.paths)
    if doubles := len(files) - len({file.path.resolve() for file in files}):
        say(f"note: {doubles:,} files are named more than once, and are read each time")
    files_of = files_record(files)
    field = {} if spec.kind == "chat" else {"field": spec.field}
    source = {"kind": spec.kind, **field, **files_of, "tokenizer": tokenizer_digest(hf_folder)}
    folder = cache_folder(root, source)
    if not folder.is_dir():
        say(f"tokenizing {spec.name}: {len(files)} files, {int(files_of['num_bytes']) / 1e6:.1f} MB, once")
        with named_os_errors(folder), sole_builder(folder, say) as staging:
            if not folder.is_dir():
                _tokenize(spec, files, table, hf_folder, staging, say)
                publish(staging, folder)
    record = read_record(folder)
    if table is not None:
        # The Arrow files of a data set differ between versions of `datasets`: the tokens are its identity.
        source = {key: value for key, value in source.items() if key not in files_of} | {"num_rows": len(table.rows)}
    parts = stored_parts(folder, record, ".tokens", record["dtype"])
    masks = stored_parts(folder, record, ".trained", "uint8") if spec.kind == "chat" else ()
    _check_samples(folder, record, [parts, masks] if masks else [parts])
    return Corpus(
        spec.name,
        folder,
        parts,
        masks,
        record["num_tokens"],
        record["num_documents"],
        {**source, **record["fingerprint"]},
        record.get("max_token"),
    )


def _check_samples(folder: Path, record: dict[str, Any], stored: list[tuple[TokenPart, ...]]) -> None:
    """Raises DamagedError when the cache gives back something else than was written; an older one can't be told."""
    found = [sample_digest(TokenStream(parts)) for parts in stored]
    if record.get("samples", found) != found:
        raise DamagedError(f"{folder} holds other tokens than were written there", hint=f"rm -r {folder}")


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
    num_documents = _gather(pieces, spec.kind == "chat", token_dtype(tokenizer), staging)
    num_rows = sum(len(each.rows) for each in tables)
    if num_documents < num_rows:
        what = "no text" if spec.kind != "chat" else "nothing that an assistant says"
        say(f"note: {num_rows - num_documents:,} of {num_rows:,} rows hold {what} and are left out")
    shutil.rmtree(staging / "datasets", ignore_errors=True)


def _gather(pieces: list[Piece], has_masks: bool, dtype: np.dtype, staging: Path) -> int:
    """Write what is known of all pieces together; returns the number of documents. Raises DamagedError when a piece is
    not what its lengths say."""
    lengths = [np.fromfile(piece.stem.with_suffix(".lengths"), np.int64) for piece in pieces]
    names = [piece.stem.name for piece in pieces]
    counts = [int(each.sum()) for each in lengths]
    parts = [TokenPart(staging / f"{n}.tokens", dtype.name, 0, c) for n, c in zip(names, counts, strict=True)]
    masks = [TokenPart(staging / f"{n}.trained", "uint8", 0, c) for n, c in zip(names, counts, strict=True)]
    everything = np.concatenate([np.empty(0, np.int64), *lengths])
    stream = TokenStream(parts)
    fingerprint = {"tokens": content_digest(stream)}
    if has_masks:
        fingerprint["trained"] = content_digest(TokenStream(masks))
    layout = {
        **{"dtype": dtype.name, "pieces": list(zip(names, counts, strict=True)), "max_token": max_token(stream)},
        "samples": [sample_digest(each) for each in (stream, *([TokenStream(masks)] if has_masks else []))],
    }
    write_record(staging, everything, fingerprint, layout)
    return len(everything)


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
    folder = cache_folder(root, source)
    if not folder.is_dir():
        say(f"reading {spec.name} once: {int(source['num_bytes']) / 1e6:.1f} MB of tokens")
        with named_os_errors(folder), sole_builder(folder, say) as staging:
            if not folder.is_dir():
                staging.mkdir(exist_ok=True)
                stream = TokenStream(parts)
                found = scan_documents(stream, len(tokenizer), tokenizer.eos_token_id, spec.name)
                fingerprint = {"tokens": content_digest(stream)}
                # Where they were when they were read: `ckptool data show --text` looks there.
                places = [[str(part.path.absolute()), part.dtype, part.offset_bytes, part.num_tokens] for part in parts]
                facts = {"files": places, "max_token": max_token(stream)}
                write_record(staging, found if lengths is None else lengths, fingerprint, facts)
                publish(staging, folder)
    record = read_record(folder)
    return Corpus(
        spec.name,
        folder,
        tuple(parts),
        (),
        record["num_tokens"],
        record["num_documents"],
        {**source, **record["fingerprint"]},
        record.get("max_token"),
    )


def _raw_dtype(spec: SourceSpec, tokenizer: Any) -> np.dtype:
    if spec.dtype not in ("", "uint8", "uint16", "uint32", "int32", "int64", "uint64"):
        raise UnsupportedError(f"{spec.name}: tokens of dtype {spec.dtype!r}", hint="dtype = uint16 or uint32")
    return np.dtype(spec.dtype) if spec.dtype else token_dtype(tokenizer)
