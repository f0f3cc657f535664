"""Stand-ins for weight files that were deleted once their bytes were safe in a checkpoint.

`model.safetensors.consumed` has the header, size and time of change of the file that it stands for and takes no space:
an interrupted import can be planned again. No other tool takes it for weights.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptool.storage.files import fsync_path, os_errors

CONSUMED_SUFFIX = ".consumed"


def consume(path: Path) -> None:
    """Put the stand-in of a safetensors file in its place, and delete the file. Raises StorageError."""
    stand_in = path.with_name(path.name + CONSUMED_SUFFIX)
    with os_errors(path):
        with path.open("rb") as file, stand_in.open("wb") as copy:
            header_bytes = file.read(8)
            copy.write(header_bytes + file.read(int.from_bytes(header_bytes, "little")))
            stat = os.fstat(file.fileno())
            copy.truncate(stat.st_size)
            copy.flush()
            os.utime(stand_in, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            os.fsync(copy.fileno())
        fsync_path(path.parent)
        path.unlink()


def original_name(file: str) -> str:
    return file.removesuffix(CONSUMED_SUFFIX)


def is_consumed(file: str) -> bool:
    return file.endswith(CONSUMED_SUFFIX)
