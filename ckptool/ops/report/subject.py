"""What a report is about: a checkpoint, the run that it comes from, or both."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.formats.dcp_metadata import is_checkpoint
from ckptool.ops.sources import find_hf
from ckptool.runs import find_latest, list_checkpoints, resolve
from ckptool.storage.files import Place
from ckptool.storage.metrics_file import METRICS_FILE
from ckptool.storage.place import place


@dataclass(frozen=True)
class Subject:
    """`checkpoint` is None for a run that has no complete one yet, `run` for a checkpoint that no run is known of."""

    checkpoint: Place | None
    run: Place | None
    is_hf: bool = False


def find_subject(name: str, root: Place | None = None, work_dir: Place | None = None) -> Subject:
    """What `name` means: a run root (then its latest complete checkpoint), a checkpoint, or a Hugging Face folder.

    With a `work_dir`, where metrics.jsonl is, a checkpoint is one of the run in the folder above it.
    Raises NotFoundError when it is none of them.
    """
    folder = place(name)
    if folder.is_dir() and not is_checkpoint(folder) and _is_run_root(folder):
        latest = find_latest(folder)
        return Subject(latest.path if latest else None, folder)
    hub_form = find_hf(name, root)
    if hub_form is not None:
        return Subject(hub_form, None, is_hf=True)
    path = resolve(name, root)
    return Subject(path, path.parent if work_dir or (path.parent / METRICS_FILE).is_file() else None)


def _is_run_root(folder: Place) -> bool:
    return (folder / METRICS_FILE).is_file() or bool(list_checkpoints(folder))
