"""What a report is about: a checkpoint, the run that it comes from, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptool.formats.dcp_metadata import is_checkpoint
from ckptool.ops.sources import find_hf
from ckptool.runs import find_latest, list_checkpoints, resolve
from ckptool.storage.files import Place
from ckptool.storage.metrics_file import METRICS_FILE
from ckptool.storage.place import local_path


@dataclass(frozen=True)
class Subject:
    """`checkpoint` is None for a run that has no complete one yet, `run` for a checkpoint that no run is known of."""

    checkpoint: Path | None
    run: Path | None
    is_hf: bool = False


def find_subject(name: str, root: Place | None = None) -> Subject:
    """What `name` means: a run root (then its latest complete checkpoint), a checkpoint, or a Hugging Face folder.

    Raises NotFoundError when it is none of them.
    """
    place = Path(name).expanduser()
    if place.is_dir() and not is_checkpoint(place) and _is_run_root(place):
        latest = find_latest(place)
        return Subject(local_path(latest.path, "report") if latest else None, place)
    hub_form = find_hf(name, root)
    if hub_form is not None:
        return Subject(local_path(hub_form, "report"), None, is_hf=True)
    path = local_path(resolve(name, root), "report")
    return Subject(path, path.parent if (path.parent / METRICS_FILE).is_file() else None)


def _is_run_root(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or bool(list_checkpoints(folder))
