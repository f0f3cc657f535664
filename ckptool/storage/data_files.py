"""The files of a source of training data, in a fixed order, and what a fingerprint remembers of them."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ckptool.errors import NotFoundError, UnsupportedError

#: File suffix -> the `datasets` builder that reads it. Files of any other suffix are text when named one by one.
BUILDERS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "json", ".parquet": "parquet"}

#: Token files above this size are digested at `_NUM_SAMPLES` places of `_SAMPLE_BYTES` each, the ends among them.
MAX_FULL_DIGEST_BYTES = 1 << 30
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16


#: Kind of source -> the suffixes that its folders are searched for.
_SUFFIXES_OF_KIND = {
    "files": tuple(BUILDERS),
    "text": (".txt", ".md", ".py"),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "chat": (".jsonl",),
    "tokens": (".bin", ".npy", ".tokens"),
}


@dataclass(frozen=True)
class SourceFile:
    """A source file; `name` is its path below the PATH it was found by, so that a moved folder is the same data."""

    path: Path
    name: str

    @property
    def builder(self) -> str:
        """The builder of `datasets` that reads it, by its suffix: text, json or parquet."""
        return BUILDERS.get(self.path.suffix.lower(), "text")


def find_source_files(kind: str, paths: tuple[str, ...]) -> list[SourceFile]:
    """The files of a source of this kind at `paths`, as `find_files` finds them.

    Raises UnsupportedError for kinds that are not known by their files, NotFoundError when a path leads to none.
    """
    if kind not in _SUFFIXES_OF_KIND:
        raise UnsupportedError(f"a source of kind {kind} is not known by its files")
    return find_files(paths, _SUFFIXES_OF_KIND[kind])


def find_files(paths: tuple[str, ...], suffixes: Iterable[str] = BUILDERS) -> list[SourceFile]:
    """The files of each path: itself, those below a folder with a known suffix (sorted, hidden ones left out), or a
    glob's. Raises NotFoundError when a path leads to none."""
    found: list[SourceFile] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            files = _below(path, frozenset(suffixes))
        elif path.is_file():
            files = [SourceFile(path, path.name)]
        else:
            files = [SourceFile(Path(p), Path(p).name) for p in sorted(glob.glob(str(path), recursive=True))]
            files = [file for file in files if file.path.is_file()]
        if not files:
            raise NotFoundError(
                f"no training text at {text}", hint=f"folders are searched for {' '.join(suffixes)} files"
            )
        found += files
    return found


def _below(folder: Path, suffixes: frozenset[str]) -> list[SourceFile]:
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in suffixes]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [SourceFile(folder / n, n.as_posix()) for n in sorted(visible, key=Path.as_posix) if (folder / n).is_file()]


def files_record(files: Sequence[SourceFile], *, sampled: bool = False) -> dict[str, str | int]:
    """A digest over the ordered names, sizes and contents, with the number of files and their bytes.

    `sampled` reads only a part of each file above MAX_FULL_DIGEST_BYTES, and the record then says so.
    """
    digest, num_bytes, is_sampled = hashlib.blake2b(digest_size=16), 0, False
    for file in files:
        size = file.path.stat().st_size
        is_large = sampled and size > MAX_FULL_DIGEST_BYTES
        is_sampled |= is_large
        with file.path.open("rb") as stream:
            content = _samples_digest(stream, size) if is_large else hashlib.file_digest(stream, "blake2b").hexdigest()
        digest.update(json.dumps([file.name, size, content]).encode())
        num_bytes += size
    record: dict[str, str | int] = {"files": digest.hexdigest(), "num_files": len(files), "num_bytes": num_bytes}
    return record | ({"content": "sampled"} if is_sampled else {})


def _samples_digest(stream: BinaryIO, size: int) -> str:
    digest = hashlib.blake2b()
    for number in range(_NUM_SAMPLES):
        stream.seek((size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
        digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
