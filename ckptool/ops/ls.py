"""What checkpoints a run root holds."""

from __future__ import annotations

from typing import Any

from ckptool import runs
from ckptool.core.plan import Result
from ckptool.storage.files import Place


def ls(root: Place | None = None) -> Result:
    """List the checkpoints under `root` (default: CKPTOOL_ROOT or ./ckpt), incomplete ones with the reason."""
    root = runs.default_root() if root is None else root
    checkpoints = [_row(summary) for summary in runs.list_checkpoints(root)]
    return Result("ls", str(root), details={"checkpoints": checkpoints})


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
