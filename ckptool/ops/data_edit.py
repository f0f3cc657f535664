"""Change a checkpoint's data position: seek, skip, other weights, a source more.

Only the data items are touched. The checkpoint's other files stay as they are, byte for byte; the new `.metadata` and
one small data file take effect together, in the moment in which the folder is swapped.
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
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.ops.data_read import StoredPosition, read_position
from ckptool.ops.data_targets import counters_at, parse_number, parse_place
from ckptool.runs import POSITION_FILE
from ckptool.storage.digests_file import read_digests
from ckptool.storage.files import Place, write_json
from ckptool.storage.place import local_path
from ckptool.storage.staging import staged_directory

#: The data file that an edit adds. The next edit puts another one in its place: all that is in it are the data items.
ITEMS_FILE = "__data_edit.distcp"


def seek(name: str, to: str, *, root: Place | None = None, reason: str = "", dry_run: bool = False) -> Result:
    """Let training of checkpoint `name` go on at another place: `unit:N`, `step:N`, `token:N`, `epoch:K`, `+N`, `-N`.

    Raises UsageError for a place that isn't one, UnsupportedError when a source is a stream, which can't jump.
    """
    stored = _indexed(read_position(name, root))
    position = stored.position
    place = parse_place(position, to)
    return _jump("seek", stored, position.consumed, place, to, reason, dry_run)


def skip(name: str, units: str, *, root: Place | None = None, reason: str = "", dry_run: bool = False) -> Result:
    """Leave out a range that is still ahead: `unit:A..B` or `step:A..B`, B not included.

    Raises UsageError for an empty range or one that was trained in part.
    """
    stored = _indexed(read_position(name, root))
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
    stored = read_position(name, root)
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
        write_position(local_path(stored.path, "changing the data position"), edited, stored.holder)
    return Result(f"data {action}", str(stored.path), executed=not dry_run, details=details)


def write_position(path: Path, position: DataPosition, holder: str = "data") -> None:
    """Give checkpoint `path` another position under the key `holder`, whole or not at all. Its lock is held meanwhile.

    Raises LockedError while a save writes the same checkpoint.
    """
    import torch

    path = path.absolute()
    manifest = read_manifest(path)
    digests = read_digests(path, manifest.save_id)
    cursor = torch.tensor(position.cursor(), dtype=torch.int64)
    with staged_directory(path, overwrite=True) as folder:
        linked = link_files(path, folder, frozenset({POSITION_FILE, ITEMS_FILE}))
        write_json(folder / POSITION_FILE, position.to_dict())
        items = {f"{holder}.cursor": cursor}, {f"{holder}.record": position.to_json()}
        replace_items(folder, manifest, digests, linked, ITEMS_FILE, *items)
