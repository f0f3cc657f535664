"""Rows of text: files and Hugging Face data sets as tables of `datasets`, and their rows as documents of tokens."""

from __future__ import annotations

import errno
import glob
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptool import DamagedError, NotFoundError, SourceFile, StorageError, UnsupportedError
from trainer.sources.spec import SourceSpec

_BUILDER_OF_KIND = {"text": "text", "jsonl": "json", "parquet": "parquet", "chat": "json"}
_ROWS_A_BATCH = 256
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Table:
    """A map-style data set and, for error messages, the file it was read from."""

    rows: Any
    where: str


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether it is trained when it is the next token; None: all are."""

    tokens: list[int]
    trained: list[int] | None = None


def file_tables(spec: SourceSpec, files: list[SourceFile], cache: Path) -> list[Table]:
    """The files as tables; `cache` gets what `datasets` makes of them. Raises DamagedError for a broken file."""
    datasets = _datasets()
    tables = []
    for builder, group in itertools.groupby(files, key=lambda f: _BUILDER_OF_KIND.get(spec.kind, f.builder)):
        names = [str(file.path) for file in group]
        patterns = [glob.escape(name) for name in names]  # `datasets` takes a[1].txt for a pattern, which a1.txt fits
        options = {"sample_by": "document", "encoding_errors": "replace"} if builder == "text" else {}
        try:
            rows = datasets.load_dataset(builder, data_files=patterns, split="train", cache_dir=str(cache), **options)
        except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            if getattr(error.__cause__ or error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"no space left on the disk of the token cache, {cache.parent}") from error
            raise DamagedError(
                f"can't read {names[0]} (and {len(names) - 1} more) as {builder}: {reason_of(error)}"
            ) from error
        tables.append(Table(rows, names[0]))
    return tables


def hub_table(spec: SourceSpec) -> Table:
    """A data set by its Hub name, of `save_to_disk`, or a folder that `load_dataset` understands.

    Raises NotFoundError when there is no such data set or split, DamagedError when it can't be read.
    """
    datasets = _datasets()
    [name] = spec.paths
    folder = Path(name).expanduser()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(data_set_place(name), spec.config or None)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise NotFoundError(f"no data set {name}: {reason_of(error)}") from error
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError, KeyError) as error:
        raise DamagedError(f"can't read the data set {name}: {reason_of(error)}") from error
    if isinstance(loaded, dict):
        if spec.split not in loaded:
            raise NotFoundError(f"{name} has no split {spec.split!r}, only {', '.join(loaded)}", hint="split = ...")
        loaded = loaded[spec.split]
    return Table(loaded, name)


def data_set_place(name: str) -> str:
    """What `load_dataset` is told for a name on the Hub, or a folder: its whole path. `text`, `json` and other names it
    takes for its own readers of whatever is in the working folder.

    Raises NotFoundError for such a name when no folder has it, UnsupportedError for a folder whose path would be taken
    for a pattern.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    folder = Path(name).expanduser()
    if folder.is_dir():
        if glob.has_magic(str(folder.absolute())):
            raise UnsupportedError(f"the library datasets can't read {folder.absolute()}: * ? [ ] are patterns to it")
        return str(folder.absolute())
    if name in _PACKAGED_DATASETS_MODULES:
        raise NotFoundError(f"no data set {name}: there is no such folder", hint="a file: --data KIND:PATH")
    return name


def table_files(table: Table) -> list[SourceFile]:
    """The Arrow files that a data set lies in. Raises UnsupportedError for one in memory."""
    paths = [Path(entry["filename"]) for entry in table.rows.cache_files]
    if not paths:
        raise UnsupportedError(f"{table.where} lies in memory, not in files", hint="save_to_disk it first")
    return [SourceFile(path, path.name) for path in paths]


def check_text(table: Table, field: str) -> None:
    """Raises DamagedError when the table has no such column."""
    if field not in table.rows.column_names:
        raise DamagedError(
            f"{table.where} has no field {field!r}, only {', '.join(table.rows.column_names)}",
            hint="field = ... in a TOML file of [[source]] tables",
        )


def text_documents(tokenizer: Any, table: Table, field: str, start: int, stop: int) -> Iterator[tuple[Document, bool]]:
    """Each non-empty text of rows `start` to `stop` with an end-of-text token, and whether it holds U+FFFD."""
    rows = table.rows.select_columns([field])
    for begin in range(start, stop, _ROWS_A_BATCH):
        texts = [text for text in rows[begin : min(begin + _ROWS_A_BATCH, stop)][field] if text]
        for text in texts:
            if not isinstance(text, str):
                raise DamagedError(f"{table.where}: the field {field!r} is no string but {type(text).__name__}")
        if not texts:
            continue
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for text, tokens in zip(texts, encoded, strict=True):
            yield Document([*tokens, tokenizer.eos_token_id]), "\ufffd" in text


def _datasets() -> Any:
    """The library, with its bars of progress only where somebody sees them."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line: `datasets` says it in several, of which the first may be "Couldn't cast"."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= _MAX_REASON_CHARACTERS else f"{text[:_MAX_REASON_CHARACTERS]}..."
