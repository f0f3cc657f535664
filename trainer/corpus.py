"""From text files to one file of tokens, made once and kept under the root."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptool import DamagedError, NotFoundError, UnsupportedError

#: File suffix -> the `datasets` builder that reads it. Files of any other suffix are text when named one by one.
_BUILDERS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "json", ".parquet": "parquet"}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
_DOCUMENTS_A_BATCH = 256
_TEXT_FIELD = "text"


@dataclass(frozen=True)
class TextFile:
    """A source file; `name` is its path below the PATH it was found by, so that a moved folder is the same data."""

    path: Path
    name: str

    @property
    def builder(self) -> str:
        return _BUILDERS.get(self.path.suffix.lower(), "text")


@dataclass(frozen=True)
class Corpus:
    """All documents as one stream of token ids on the disk, each followed by the end-of-text token."""

    path: Path
    dtype: str
    num_tokens: int
    fingerprint: dict[str, str | int]

    def tokens(self) -> np.ndarray:
        """The stream, mapped, not read: shape (num_tokens,). Raises DamagedError when the file has another size."""
        size = self.path.stat().st_size
        if size != self.num_tokens * np.dtype(self.dtype).itemsize:
            raise DamagedError(f"{self.path} should hold {self.num_tokens} tokens", hint=f"rm -r {self.path.parent}")
        return np.memmap(self.path, dtype=self.dtype, mode="r")


def open_corpus(paths: tuple[str, ...], hf_folder: Path, root: Path, say: Callable[[str], None]) -> Corpus:
    """The tokens of `paths`, from the cache under `root` when these very files were tokenized before.

    Raises NotFoundError when a path leads to no file, DamagedError when a file can't be read as what it is.
    """
    files = find_files(paths)
    source = {**_files_digest(files), "tokenizer": _tokenizer_digest(hf_folder)}
    folder = root / ".data-cache" / _digest(json.dumps(source, sort_keys=True).encode())
    if not folder.is_dir():
        say(f"tokenizing {len(files)} files, {int(source['num_bytes']) / 1e6:.1f} MB, once")
        _build(files, hf_folder, folder, say)
    record = json.loads((folder / "tokens.json").read_text())
    fingerprint = {**source, "num_tokens": record["num_tokens"], "tokens": record["digest"]}
    return Corpus(folder / "tokens.bin", record["dtype"], record["num_tokens"], fingerprint)


def find_files(paths: tuple[str, ...]) -> list[TextFile]:
    """The files of each path: itself, the known files below a folder (sorted, hidden ones left out), or a glob's."""
    found: list[TextFile] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            files = _below(path)
        elif path.is_file():
            files = [TextFile(path, path.name)]
        else:
            files = [TextFile(Path(p), Path(p).name) for p in sorted(glob.glob(str(path), recursive=True))]
            files = [file for file in files if file.path.is_file()]
        if not files:
            raise NotFoundError(
                f"no training text at {text}", hint=f"folders are searched for {' '.join(_BUILDERS)} files"
            )
        found += files
    return found


def _below(folder: Path) -> list[TextFile]:
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in _BUILDERS]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [TextFile(folder / n, n.as_posix()) for n in sorted(visible, key=Path.as_posix) if (folder / n).is_file()]


def _build(files: list[TextFile], hf_folder: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Tokenize into a hidden folder beside `folder`, then rename it: an unfinished cache is never read."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".tokenizing-", dir=folder.parent))
    try:
        record = _write_tokens(files, hf_folder, staging, say)
        (staging / "tokens.json").write_text(json.dumps(record))
        os.rename(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_tokens(
    files: list[TextFile], hf_folder: Path, staging: Path, say: Callable[[str], None]
) -> dict[str, str | int]:
    tokenizer = _load_tokenizer(hf_folder)
    dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
    digest, num_tokens, num_replaced = hashlib.blake2b(digest_size=16), 0, 0
    with (staging / "tokens.bin").open("wb") as out:
        for documents in _batches(_documents(files, staging / "datasets")):
            num_replaced += sum("\ufffd" in document for document in documents)
            encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
            ids = itertools.chain.from_iterable([*document, tokenizer.eos_token_id] for document in encoded)
            tokens = np.fromiter(ids, dtype=dtype)
            out.write(tokens.tobytes())
            digest.update(tokens.tobytes())
            num_tokens += len(tokens)
        out.flush()
        os.fsync(out.fileno())
    shutil.rmtree(staging / "datasets", ignore_errors=True)
    if num_replaced:
        say(f"note: {num_replaced} documents hold U+FFFD; bytes that are not UTF-8 are read as that")
    return {"num_tokens": num_tokens, "dtype": dtype, "digest": digest.hexdigest()}


def _load_tokenizer(hf_folder: Path) -> Any:
    import transformers

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


def _documents(files: list[TextFile], cache: Path) -> Iterator[str]:
    """Every non-empty document in file order: a whole text file, or a row's `text` field."""
    import datasets

    datasets.disable_progress_bars()
    for builder, group in itertools.groupby(files, key=lambda file: file.builder):
        names = [str(file.path) for file in group]
        options = {"sample_by": "document", "encoding_errors": "replace"} if builder == "text" else {}
        try:
            table = datasets.load_dataset(builder, data_files=names, split="train", cache_dir=str(cache), **options)
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            cause = error.__cause__ or error
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            raise DamagedError(f"can't read {names[0]} (and {len(names) - 1} more) as {builder}: {reason}") from error
        if _TEXT_FIELD not in table.column_names:
            raise DamagedError(f"{names[0]} has no field {_TEXT_FIELD!r}, only {', '.join(table.column_names)}")
        for row in table.select_columns([_TEXT_FIELD]):
            document = row[_TEXT_FIELD]
            if document is not None and not isinstance(document, str):
                raise DamagedError(f"{names[0]}: the field {_TEXT_FIELD!r} is no string but {type(document).__name__}")
            if document:
                yield document


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(documents, _DOCUMENTS_A_BATCH)):
        yield batch


def _files_digest(files: list[TextFile]) -> dict[str, str | int]:
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    for file in files:
        with file.path.open("rb") as stream:
            content = hashlib.file_digest(stream, "blake2b").hexdigest()
            size = stream.tell()
        digest.update(json.dumps([file.name, size, content]).encode())
        num_bytes += size
    return {"files": digest.hexdigest(), "num_files": len(files), "num_bytes": num_bytes}


def _tokenizer_digest(hf_folder: Path) -> str:
    found = {path for pattern in _TOKENIZER_FILES for path in hf_folder.glob(pattern) if path.is_file()}
    return _digest(b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(found)))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
