"""A run root: the names of its checkpoints, what state each is in, and which is the newest complete one."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ckptool.core.checkpoint import Manifest
from ckptool.core.provenance import Provenance
from ckptool.errors import CkptoolError, NotFoundError
from ckptool.formats.dcp_glance import glance
from ckptool.formats.dcp_metadata import (
    METADATA_FILE,
    PROVENANCE_FILE,
    checkpoints_inside,
    is_checkpoint,
    read_manifest,
    read_provenance,
)
from ckptool.storage.files import Place, os_errors, read_json
from ckptool.storage.lock import is_stale, owner_of
from ckptool.storage.pins import read_pins
from ckptool.storage.place import inside, place
from ckptool.storage.staging import is_staging, recover, target_of
from ckptool.storage.store import is_url
from ckptool.storage.store_path import StorePath

POSITION_FILE = "data_position.json"
_STEP_NAME = re.compile(r"step-(\d+)")

#: Where trainers that save a folder for each part put the model: accelerate and its kin, NeMo.
_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_\d+|model|weights|model_and_optim")


@dataclass(frozen=True)
class Latest:
    """The newest complete checkpoint; `passed_over` gives (name, reason) of every newer one that is not complete."""

    path: Place
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CheckpointSummary:
    """One line of a listing. `reason` is "" for a complete checkpoint; `created` is a Unix time in seconds.

    `kind` is "checkpoint", or "staging" for a folder that a save in progress or a killed one has left. `pinned` is the
    reason of its pin, None for a checkpoint that is not pinned.
    """

    name: str
    path: Place
    step: int | None
    num_bytes: int
    complete: bool
    reason: str
    world_size: int | None
    consumed: int | None
    created: float | None
    kind: str = "checkpoint"
    pinned: str | None = None


def default_root() -> Place:
    """Where checkpoints live when nobody says: the environment's CKPTOOL_ROOT, else ./ckpt."""
    return place(os.environ.get("CKPTOOL_ROOT") or "ckpt")


def resolve(name: str | Place, root: Place | None = None) -> Place:
    """The checkpoint that `name` means: a path, a name under `root` (default: `default_root()`), or `latest`.

    A folder in which a trainer has saved each part apart means its model. An incomplete checkpoint is returned too:
    reading it says what is wrong. Raises NotFoundError when there is none, naming what is there.
    """
    root = default_root() if root is None else root
    places = possible_places(name, root)
    for path in places:
        recover(path)
    found = next((path for path in places if _looks_like_checkpoint(path)), None)
    if found is not None:
        return found
    name = str(places[0]) if is_url(str(name)) else name  # without credentials, for what is said below
    if str(name) == "latest":
        return _resolve_latest(root)
    with os_errors(str(name)):
        found_inside = [inner for path in places for inner in checkpoints_inside(path)]
    models = {path for path in found_inside if path.parent in places and _MODEL_FOLDER.fullmatch(path.name)}
    if len(models) == 1:
        return models.pop()
    if found_inside:
        candidates = ", ".join(dict.fromkeys(str(path) for path in found_inside[:5]))
        raise NotFoundError(f"{name} is not a checkpoint, but has some inside", hint=f"did you mean {candidates}?")
    existing = next((path for path in places if path.exists()), None)
    if existing is not None and any(existing.glob("shard-*.safetensors")):
        raise NotFoundError(
            f"{existing} is DCP in safetensors files, which this command doesn't read as it is",
            hint=f"ckptool import-hf {existing}",
        )
    if existing is not None:
        raise NotFoundError(
            f"{existing} is not a checkpoint: it has no {METADATA_FILE}", hint=_what_is_there(name, root)
        )
    if len(places) == 1:  # a URL
        raise NotFoundError(f"no checkpoint {name}", hint=f"ckptool ls {places[0].parent} shows what is there")
    raise NotFoundError(f"no checkpoint {name}, neither as a path nor under {root}", hint=_what_is_there(name, root))


def possible_places(name: str | Place, root: Place | None = None) -> list[Place]:
    """Where to look for what the user calls `name`, in this order."""
    if isinstance(name, StorePath) or is_url(str(name)):
        return [place(name)]
    below = inside(default_root() if root is None else root, str(name))
    # A bare name means the root's checkpoint, even when this folder has something of that name.
    return [place(name), below] if os.sep in str(name) else [below, place(name)]


def model_places(name: str | Place, root: Place | None = None) -> list[Place]:
    """Where `name` may mean a model in a form of another program: the places up to the first that has a checkpoint, for
    then it means that one. A half-copied checkpoint counts: what is wrong with it is to be said."""
    places = possible_places(name, root)
    last = next((number for number, path in enumerate(places) if _looks_like_checkpoint(path)), len(places))
    return places[: last + 1]


def find_latest(root: Place | str) -> Latest | None:
    """The newest complete checkpoint among the folders named `step-N` under `root`; None when there is none.

    Complete means: its metadata parses, every tensor is covered exactly, every byte range lies inside its file.
    """
    latest, _ = _search_latest(place(root))
    return latest


def list_checkpoints(root: Place | str) -> list[CheckpointSummary]:
    """Everything under `root` that is, or was to become, a checkpoint: those without a step first, then by step.

    Reads metadata only. Raises NotFoundError when `root` is a file; a missing root is an empty one.
    """
    root = place(root)
    pins = read_pins(root) if root.is_dir() else {}
    folders = [path for path in _folders(root) if is_staging(path) or _looks_like_checkpoint(path)]
    summaries = [_summarise(path, pins.get(path.name)) for path in folders]
    return sorted(summaries, key=lambda s: (-1 if s.step is None else s.step, s.name))


def is_step_name(name: str) -> bool:
    """True for `step-N`, the only names that count as checkpoints of a run."""
    return _STEP_NAME.fullmatch(name) is not None


def _search_latest(root: Place) -> tuple[Latest | None, tuple[tuple[str, str], ...]]:
    """The newest complete checkpoint, and (name, reason) of all that were passed over on the way to it."""
    passed_over: list[tuple[str, str]] = []
    steps = [path for path in _folders(root) if _STEP_NAME.fullmatch(path.name)]
    for path in sorted(steps, key=lambda p: int(p.name.removeprefix("step-")), reverse=True):
        reason = _read(path)[1]
        if not reason:
            return Latest(path, tuple(passed_over)), tuple(passed_over)
        passed_over.append((path.name, reason))
    return None, tuple(passed_over)


def _resolve_latest(root: Place) -> Place:
    latest, passed_over = _search_latest(root)
    if latest is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over[:3])
        raise NotFoundError(f"no complete step-N checkpoint under {root}", hint=reasons or f"ckptool ls {root}")
    return latest.path


def _folders(root: Place) -> list[Place]:
    with os_errors(root):
        if root.exists() and not root.is_dir():
            raise NotFoundError(f"{root} is a file, not a folder of checkpoints")
        if not root.exists():
            return []
        for path in list(root.iterdir()):
            if isinstance(path, Path) and is_staging(path):
                recover(target_of(path))
        return sorted(path for path in root.iterdir() if path.is_dir())


def _looks_like_checkpoint(path: Place) -> bool:
    """True for checkpoints and for what is left of them. A folder named step-N is one, whatever it holds."""
    if not path.is_dir() or path.name.startswith("."):
        return False
    return (
        is_checkpoint(path)
        or (path / PROVENANCE_FILE).exists()
        or any(path.glob("*.distcp"))
        or (_STEP_NAME.fullmatch(path.name) is not None and not checkpoints_inside(path))
    )


def _read(path: Place) -> tuple[Manifest | None, str]:
    """A checkpoint's manifest, or the reason in one line why it can't be used."""
    try:
        return read_manifest(path), ""
    except CkptoolError as error:
        return None, str(error).removeprefix(f"{path}/").removeprefix(f"{path}: ").removeprefix(f"{path} ")


def _summarise(path: Place, pinned: str | None) -> CheckpointSummary:
    if isinstance(path, StorePath):
        return _summarise_listed(path, pinned)
    num_bytes, provenance, reason = (None, None, _writer_of(path)) if is_staging(path) else _look_at(path)
    step_name = _STEP_NAME.fullmatch(path.name)
    return CheckpointSummary(
        name=path.name,
        path=path,
        step=int(step_name[1]) if step_name else provenance.step if provenance else None,
        num_bytes=bytes_on_disk(path) if num_bytes is None else num_bytes,
        complete=num_bytes is not None,
        reason=reason,
        world_size=provenance.world_size if provenance else None,
        consumed=_consumed(path),
        created=_created(path, provenance.created if provenance else ""),
        kind="staging" if is_staging(path) else "checkpoint",
        pinned=pinned,
    )


def _look_at(path: Path) -> tuple[int | None, Provenance | None, str]:
    """Bytes of the tensors and the provenance of a complete checkpoint; else the reason why it is none."""
    num_bytes = glance(path)
    if num_bytes is not None:
        with contextlib.suppress(CkptoolError):
            return num_bytes, read_provenance(path), ""
    manifest, reason = _read(path)
    return (manifest.num_bytes, manifest.provenance, "") if manifest else (None, None, reason)


def _summarise_listed(path: StorePath, pinned: str | None) -> CheckpointSummary:
    """Of a store's checkpoint only what the listing says: reading thousands of small files would take minutes.

    Its `.metadata` was written last, after all else had been read back.
    """
    step_name = _STEP_NAME.fullmatch(path.name)
    complete = is_checkpoint(path)
    return CheckpointSummary(
        name=path.name,
        path=path,
        step=int(step_name[1]) if step_name else None,
        num_bytes=sum((path / name).stat().st_size for name in path.names_below()),
        complete=complete,
        reason="" if complete else f"is incomplete: it has no {METADATA_FILE}, which is written last",
        world_size=None,
        consumed=None,
        created=path.stat().st_mtime or None,
        pinned=pinned,
    )


def _writer_of(staging: Path) -> str:
    """Who is writing there, or was."""
    owner = owner_of(staging)
    if owner is None:
        return "unfinished: not published"
    return f"left unfinished by {owner}, which is gone" if is_stale(staging) else f"being written by {owner}"


def bytes_on_disk(path: Path) -> int:
    """Of all files below `path`; those that vanish meanwhile, as a writer's do, count nothing."""
    num_bytes = 0
    for parent, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, file)).st_size
    return num_bytes


def _consumed(path: Place) -> int | None:
    try:
        position = read_json(path / POSITION_FILE)
    except CkptoolError:
        return None  # a listing shows what it can; reading the checkpoint will complain
    consumed = position.get("consumed") if isinstance(position, dict) else None
    return consumed if isinstance(consumed, int) else None


def _created(path: Path, recorded: str) -> float | None:
    """The recorded time of writing, else the folder's own; None for one that is gone by now."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.datetime.fromisoformat(recorded).timestamp()
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _what_is_there(name: str | Place, root: Place) -> str:
    names = [path.name for path in _folders(root) if _looks_like_checkpoint(path)]
    if not names:
        return f"there are no checkpoints under {root}; --root or CKPTOOL_ROOT says where to look"
    near = difflib.get_close_matches(str(name).rpartition("/")[2], names, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"there: {', '.join(names[:8])}"
