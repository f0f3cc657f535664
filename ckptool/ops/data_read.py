"""A checkpoint's data position, from the items that a resume reads."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

from ckptool import runs
from ckptool.core.box import Box
from ckptool.core.position import CURSOR_LENGTH, DataPosition
from ckptool.errors import DamagedError, NotFoundError
from ckptool.formats.dcp_source import DcpSource
from ckptool.storage.files import Place

#: Where trainers keep it: ours and `GlobalBatchSampler`'s under `data`, torchtitan its loader's under `dataloader`.
_HOLDERS = ("data", "dataloader")
STEP = "step"
LANE_PREFIX = "data.lane."


@dataclass(frozen=True)
class StoredPosition:
    """`step` is the checkpoint's own count of optimizer steps, None when it has none; `cursor` its integers.

    `holder` is the key that `.record` and `.cursor` are under. `num_lanes` counts the states of streaming sources,
    whose place isn't in the position. `is_ours` when the checkpoint has a `ckptool.json`, and so a position file.
    """

    path: Place
    position: DataPosition
    cursor: tuple[int, ...]
    step: int | None
    num_lanes: int
    holder: str = "data"
    is_ours: bool = True

    @property
    def record_fqn(self) -> str:
        return f"{self.holder}.record"

    @property
    def cursor_fqn(self) -> str:
        return f"{self.holder}.cursor"


def read_position(name: str | Place, root: Place | None = None) -> StoredPosition:
    """The data position of checkpoint `name`.

    Raises NotFoundError when there is no such checkpoint or it has none, DamagedError when it can't be read.
    """
    path = runs.resolve(name, root)
    with contextlib.closing(DcpSource(path)) as source:
        objects, tensors = source.manifest.objects, source.manifest.tensors
        holder = next((h for h in _HOLDERS if f"{h}.record" in objects and f"{h}.cursor" in tensors), None)
        if holder is None:
            raise NotFoundError(
                f"{path} has no data position", hint="training checkpoints have one: ckptool ls shows them"
            )
        record_fqn = f"{holder}.record"
        record = source.load_object(record_fqn)
        cursor = _integers(source, f"{holder}.cursor", CURSOR_LENGTH)
        step = _integers(source, STEP, 1)[0] if STEP in source.manifest.tensors else None
        if step is None and source.manifest.provenance is not None:
            step = source.manifest.provenance.step
        num_lanes = sum(fqn.startswith(LANE_PREFIX) for fqn in source.manifest.objects)
        is_ours = source.manifest.provenance is not None
    if not isinstance(record, str):
        raise DamagedError(f"{path}: {record_fqn} is no text")
    position = DataPosition.from_json(record, f"{path}: {record_fqn}", num_steps=step)
    return StoredPosition(path, position, cursor, step, num_lanes, holder, is_ours)


def _integers(source: DcpSource, fqn: str, count: int) -> tuple[int, ...]:
    entry = source.manifest.tensors[fqn]
    if entry.dtype != "int64" or entry.num_elements != count:
        raise DamagedError(f"{source.manifest.location}: {fqn} is {entry.dtype} {list(entry.shape)}")
    raw = bytearray(8 * count)
    source.read_into(fqn, Box((0,) * len(entry.shape), entry.shape), memoryview(raw))
    return struct.unpack(f"<{count}q", raw)
