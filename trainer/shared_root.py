"""Do all ranks see the same run root? On several nodes a folder of one name may be each node's own."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from ckptool import UsageError
from trainer.os_errors import named_os_errors
from trainer.parallel import Ranks


def check_shared_root(root: Path, ranks: Ranks) -> None:
    """Raises UsageError on every rank when some don't see what rank 0 writes under `root`."""
    probe = ranks.from_rank0(lambda: _leave_probe(root))
    path = root / probe
    missing = [host for sees, host in ranks.gather((path.exists(), socket.gethostname())) if not sees]
    if ranks.rank == 0:
        path.unlink(missing_ok=True)
    if missing:
        raise UsageError(
            f"{root} is not the same folder on all nodes: {len(missing)} ranks ({', '.join(sorted(set(missing))[:5])}) "
            "don't see what rank 0 writes there",
            hint="give a --root, and data, on storage that all nodes share",
        )


def _leave_probe(root: Path) -> str:
    name = f".seen-by-all-{uuid.uuid4().hex}"
    with named_os_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / name, os.O_CREAT | os.O_WRONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return name
