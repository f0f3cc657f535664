"""Mark a checkpoint as one that `prune` and the trainer's retention leave alone."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from ckptool import runs
from ckptool.core.plan import Result
from ckptool.errors import UsageError
from ckptool.storage.files import Place
from ckptool.storage.pins import read_pins, remove_pin, write_pin


def pin(name: str, *, root: Place | None = None, reason: str = "", remove: bool = False) -> Result:
    """Pin checkpoint `name`, or with `remove` take its pin away.

    The pin lies in the folder that holds the checkpoint. Raises NotFoundError when there is no such checkpoint, or no
    such pin.
    """
    if remove and reason:
        raise UsageError("--reason goes with a new pin, not with --remove")
    folder = runs.default_root() if root is None else root
    if remove and name in read_pins(folder):  # the checkpoint may be gone already
        remove_pin(folder, name)
        return Result("pin", str(folder / name), details={"name": name, "pinned": False, "reason": ""})
    path = runs.resolve(name, root)
    path = Path(os.path.abspath(path)) if isinstance(path, Path) else path
    if remove:
        remove_pin(path.parent, path.name)
    else:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        write_pin(path.parent, path.name, {"reason": reason, "created": created})
    return Result("pin", str(path), details={"name": path.name, "pinned": not remove, "reason": reason})
