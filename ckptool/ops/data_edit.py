"""Change a checkpoint's data position: seek, skip, other weights, a source more.

Only the data items are touched. The checkpoint's other files stay as they are, byte for byte; the new `.metadata` and
one small data file take effect together, in the moment in which the folder is swapped. In a store they replace the old
ones, `.metadata` last.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptool.core.data_source import DataSource
from ckptool.core.plan import Result
from ckptool.core.position import DataPosition
from ckptool.core.position_edits import jump, place_of, redefine, with_edit
from ckptool.errors import UnsupportedError, UsageError
from ckptool.formats.dcp_items import link_files, replace_items
from ckptool.formats.dcp_metadata import METADATA_FILE, read_manifest
from ckptool.ops.data_read import StoredPosition, read_position
from ckptool.ops.data_targets import counters_at, parse_number, parse_place
from ckptool.runs import POSITION_FILE, resolve
from ckptool.storage.digests_file import DIGESTS_FILE, read_digests
from ckptool.storage.files import Place, write_json
from ckptool.storage.place import files_below
from ckptool.storage.replace_files import finish_replacing, replace_files
from ckptool.storage.scratch import scratch_folder
from ckptool.storage.staging import staged_directory
from ckptool.storage.store_path import StorePath

#: The data file that an edit adds. The next edit puts another one in its place: all that is in it are the data items.
ITEMS_FILE = "__data_edit.distcp"

#: In a store a file is never written over while `.metadata` still points into it, so two names take turns.
_ITEMS_FILES = (ITEMS_FILE, "__data_edit_2.distcp")


def seek(name: str, to: str, *, root: Place | None = None, reason: str = "", dry_run: bool = False) -> Result:
    """Let training of checkpoint `name` go on at another place: `unit:N`, `step:N`, `token:N`, `epoch:K`, `+N`, `-N`.

    Raises UsageError for a place that isn't one, UnsupportedError when a source is a stream, which can't jump.
    """
    stored = _indexed(_to_change(name, root, dry_run))
    position = stored.position
    place = parse_place(position, to)
    return _jump("seek", stored, position.consumed, place, to, reason, dry_run)


def skip(name: str, units: str, *, root: Place | None = None, reason: str = "", dry_run: bool = False) -> Result:
    """Leave out a range that is still ahead: `unit:A..B` or `step:A..B`, B not included.

    Raises UsageError for an empty range or one that was trained in part.
    """
    stored = _indexed(_to_change(name, root, dry_run))
    kind, _, rest = units.partition(":")
    first, dots, last = rest.partition("..")
    if not dots:
        raise UsageError(f"{units!r} is no range", hint="write unit:A..B or step:A..B; B is not skipped")
    start, end = (parse_number(stored.position, f"{kind}:{number}") for number in (first, last))
    if end <= start:
        raise UsageError(f"{units} holds no unit")
    return _jump("skip", stored, start, place_of(stored.position, end), units, reason, dry_run)


def edit(
    name: str,
    *,
    weights: Mapping[str, float] | None = None,
    add_sources: tuple[DataSource, ...] = (),
    root: Place | None = None,
    reason: str = "",
    dry_run: bool = False,
) -> Result:
    """Mix by other weights from here on, with `add_sources` beside the present ones; sources without a weight go.

    Raises UsageError for weights that don't fit the sources, or when nothing changes.
    """
    stored = _to_change(name, root, dry_run)
    position, now = stored.position, stored.position.segment
    sources = {source.name: source for source in (*now.sources, *add_sources)}
    if len(sources) != len(now.sources) + len(add_sources):
        raise UsageError("a source of that name is there already")
    if weights is None:
        raise UsageError("a changed mixture needs weights for all its sources", hint="--weights a=.7,b=.3")
    unknown = ", ".join(sorted(set(weights) - set(sources)))
    if unknown:
        raise UsageError(f"no source is called {unknown}", hint=f"sources: {', '.join(sources)}")
    kept = [source for source_name, source in sources.items() if source_name in weights]
    wanted = DataPosition.begin(
        kept, seq_len=now.seq_len, seed=now.seed, global_batch_size=position.global_batch_size, weights=weights
    )
    changed, changes = redefine(position, wanted.segment)
    return _finish("edit", stored, changed, changes, {"changes": changes}, reason, dry_run)


def _jump(
    action: str, stored: StoredPosition, number: int, place: int, text: str, reason: str, dry_run: bool
) -> Result:
    position = stored.position
    changed, effect = jump(position, number, place)
    here = number - position.segment.start + position.segment.phase
    before, after = counters_at(position, here), counters_at(position, place)
    changes = [f"{text}: at unit {number}, {effect.num_repeated} units are trained again, {effect.num_skipped} skipped"]
    changes += [
        f"{name}: epoch {before[name][0]} unit {before[name][1]} -> epoch {after[name][0]} unit {after[name][1]}"
        for name in before
        if before[name] != after[name]
    ]
    details = {
        "at_unit": number,
        "num_repeated": effect.num_repeated,
        "num_skipped": effect.num_skipped,
        "num_repeated_tokens": effect.num_repeated * position.segment.seq_len,
        "num_skipped_tokens": effect.num_skipped * position.segment.seq_len,
        "changes": changes,
    }
    return _finish(action, stored, changed, changes, details, reason, dry_run)


def begin_change(path: Place) -> None:
    """Bring a change of checkpoint `path` to its end that was interrupted. Raises UnsupportedError where nothing can be
    written."""
    if isinstance(path, StorePath):
        path.store.check_writable()
        finish_replacing(path)


def _to_change(name: str, root: Place | None, dry_run: bool) -> StoredPosition:
    path = resolve(name, root)
    if not dry_run:
        begin_change(path)
    return read_position(path)


def _indexed(stored: StoredPosition) -> StoredPosition:
    if stored.num_lanes:
        raise UnsupportedError(
            f"{stored.path} is trained on a stream, which can only be read on from where it stands",
            hint="an earlier checkpoint stands at an earlier place",
        )
    return stored


def _finish(
    action: str,
    stored: StoredPosition,
    changed: DataPosition,
    changes: list[str],
    details: dict[str, Any],
    reason: str,
    dry_run: bool,
) -> Result:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    edited = with_edit(changed, action, changes, reason=reason, when=when)
    if not dry_run:
        write_position(stored.path, edited, stored.holder)
    return Result(f"data {action}", str(stored.path), executed=not dry_run, details=details)


def write_position(path: Place, position: DataPosition, holder: str = "data") -> None:
    """Give checkpoint `path` another position under the key `holder`, whole or not at all. Its lock is held meanwhile.

    Raises LockedError while a save writes the same checkpoint. There are no locks in a store: StorageError when
    somebody else has changed the checkpoint meanwhile.
    """
    import torch

    path = path.absolute()
    cursor = torch.tensor(position.cursor(), dtype=torch.int64)
    items = {f"{holder}.cursor": cursor}, {f"{holder}.record": position.to_json()}
    if isinstance(path, StorePath):
        _replace_in_store(path, position, items)
        return
    manifest = read_manifest(path)
    digests = read_digests(path, manifest.save_id)
    with staged_directory(path, overwrite=True) as folder:
        linked = link_files(path, folder, frozenset({POSITION_FILE, *_ITEMS_FILES}))
        write_json(folder / POSITION_FILE, position.to_dict())
        replace_items(folder, manifest, digests, linked, ITEMS_FILE, *items)


def _replace_in_store(path: StorePath, position: DataPosition, items: tuple[dict[str, Any], dict[str, str]]) -> None:
    read_from = path.store.file((path / METADATA_FILE).key)
    manifest = read_manifest(path)
    digests = read_digests(path, manifest.save_id)
    in_use = {item.locator.file for fqn, item in manifest.objects.items() if fqn in items[1] and item.locator}
    new, other = _ITEMS_FILES if ITEMS_FILE not in in_use else _ITEMS_FILES[::-1]
    kept = frozenset(files_below(path)) - {POSITION_FILE, METADATA_FILE, DIGESTS_FILE, *_ITEMS_FILES}
    with scratch_folder() as scratch:
        content = Path(scratch, "content")
        content.mkdir()
        write_json(content / POSITION_FILE, position.to_dict())
        replace_items(content, manifest, digests, kept, new, *items)
        replace_files(path, content, read_from)
    if (path / other).is_file():
        path.store.remove((path / other).key)
