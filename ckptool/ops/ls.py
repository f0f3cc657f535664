"""What checkpoints a run root holds."""

from __future__ import annotations

from typing import Any

from ckptool import runs
from ckptool.core.plan import Result
from ckptool.errors import NotFoundError
from ckptool.storage.files import Place, os_errors


def ls(root: Place | None = None) -> Result:
    """List the checkpoints under `root` (default: CKPTOOL_ROOT or ./ckpt), incomplete ones with the reason.

    Raises NotFoundError when a root that was named is not there; the default one may come later.
    """
    if root is not None:
        check_root(root)
    root = runs.default_root() if root is None else root
    checkpoints = [_row(summary) for summary in runs.list_checkpoints(root)]
    return Result("ls", str(root), details={"checkpoints": checkpoints})


def check_root(root: Place) -> None:
    """Raise NotFoundError when there is no such folder: a mistyped root is not an empty one."""
    with os_errors(root):
        is_there = root.exists()
    if not is_there:
        raise NotFoundError(
            f"there is no folder {root}",
            hint="the root is the folder that holds the checkpoints: the argument, --root or CKPTOOL_ROOT says which",
        )


def _row(summary: runs.CheckpointSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "path": str(summary.path),
        "kind": summary.kind,
        "step": summary.step,
        "num_bytes": summary.num_bytes,
        "complete": summary.complete,
        "reason": summary.reason,
        "world_size": summary.world_size,
        "consumed": summary.consumed,
        "created": summary.created,
        "pinned": summary.pinned,
    }
