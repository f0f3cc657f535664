"""SourceSpec: what a person says about a source, as `--data kind:path` or as a `[[source]]` table of a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ckptool import NotFoundError, UsageError

#: Kind -> what its path leads to; `docs/howto/data-sources.md` says more about each.
KINDS = {
    "files": "a file, a folder or a glob of .txt .md .py .jsonl .parquet files",
    "text": "text files of any suffix; a file is a document",
    "jsonl": "JSON lines of any suffix",
    "parquet": "Parquet files of any suffix",
    "chat": "JSON lines of conversations; the assistant's tokens are trained",
    "hf": "a folder of datasets' save_to_disk, a folder of data files, or a dataset's name on the Hub",
    "tokens": "token files: raw, .npy, or with llm.c's header",
    "megatron": "a Megatron data set, named by its prefix, its .bin or its .idx",
    "stream": "as hf, or a file, but read while training",
    "loader": "MODULE:FUNCTION, which makes a loader of your own",
}


@dataclass(frozen=True)
class SourceSpec:
    """One source. `paths` has several members for `files` only; `weight` is its share in a mixture, None by size.

    `field` is the column that holds the text; `split` and `config` choose inside a data set of kind `hf`; `dtype` is
    that of raw token files, "" for the smallest unsigned one that holds the vocabulary; `lanes` is how many of them a
    source of kind `stream` has, `shuffle` in blocks of how many rows each is shuffled, 0 for not at all.
    """

    kind: str
    paths: tuple[str, ...]
    name: str
    weight: float | None = None
    field: str = "text"
    split: str = "train"
    config: str = ""
    dtype: str = ""
    lanes: int = 8
    shuffle: int = 0


def parse_sources(data: Iterable[str]) -> tuple[SourceSpec, ...]:
    """The sources of the `--data` options. All plain paths together are one source, at the place of the first one.

    Raises UsageError for an unknown kind, an unreadable table, two sources of one name, NotFoundError for a missing
    TOML file.
    """
    specs: list[SourceSpec] = []
    plain: list[str] = []
    for text in data:
        kind, colon, path = text.partition(":")
        if text.endswith(".toml"):
            specs += _read_table(Path(text))
        elif colon and kind in KINDS:
            specs.append(SourceSpec(kind, (path,), name=_name_of(path)))
        elif colon and kind.isalpha() and len(kind) > 1 and not Path(text).exists():
            raise UsageError(f"--data {text}: no kind of source is called {kind!r}", hint=f"kinds: {' '.join(KINDS)}")
        else:
            if not plain:
                specs.append(SourceSpec("files", (), name="files"))
            plain.append(text)
    specs = [SourceSpec("files", tuple(plain), name="files") if not spec.paths else spec for spec in specs]
    names = [spec.name for spec in specs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"two sources are called {double!r}", hint="name them in a TOML file: name = ...")
    return tuple(specs)


def _name_of(path: str) -> str:
    return Path(path.rstrip("/")).name or path


def _read_table(path: Path) -> list[SourceSpec]:
    """The `[[source]]` tables of a file; relative paths in it are relative to its folder."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    tables = document.pop("source", None)
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise UsageError(f"{path} should hold [[source]] tables and nothing else")
    return [_parse_table(table, path, number) for number, table in enumerate(tables, start=1)]


def _parse_table(table: dict[str, Any], path: Path, number: int) -> SourceSpec:
    where = f"{path}, source {number}"
    known = {field.name for field in fields(SourceSpec)} - {"paths"} | {"path"}
    if unknown := sorted(set(table) - known):
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}", hint=f"keys: {' '.join(sorted(known))}")
    kind, target = table.get("kind", "files"), table.get("path")
    if kind not in KINDS:
        raise UsageError(f"{where}: no kind of source is called {kind!r}", hint=f"kinds: {' '.join(KINDS)}")
    texts = {key: table.get(key, "") for key in known - {"weight", "path", "lanes", "shuffle"}}
    if not isinstance(target, str) or not target or not all(isinstance(value, str) for value in texts.values()):
        raise UsageError(f"{where}: path must be there, and all keys but weight, lanes and shuffle must be strings")
    weight = table.get("weight")
    if weight is not None and (type(weight) not in (int, float) or not 0 < weight < float("inf")):
        raise UsageError(f"{where}: weight is {weight!r}, not a positive number")
    lanes = table.get("lanes", 1)
    if type(lanes) is not int or lanes < 1:
        raise UsageError(f"{where}: lanes is {lanes!r}, not a positive number")
    shuffle = table.get("shuffle", 0)
    if type(shuffle) is not int or shuffle < 0:
        raise UsageError(f"{where}: shuffle is {shuffle!r}, not a number of rows")
    if shuffle and kind != "stream":
        raise UsageError(f"{where}: shuffle is for streams", hint="all other sources are shuffled as a whole")
    beside = path.parent / Path(target).expanduser()
    if kind not in ("hf", "stream", "loader") or beside.exists():
        target = str(beside)
    options = {key: table[key] for key in ("field", "split", "config", "dtype", "lanes", "shuffle") if key in table}
    return SourceSpec(kind, (target,), table.get("name", _name_of(target)), weight, **options)
