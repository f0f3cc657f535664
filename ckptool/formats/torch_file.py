"""Writing one `torch.save` file of a whole checkpoint, tensor by tensor, without ever holding it in memory.

torch writes the archive first with the storages left empty (`skip_data`); their bytes are then put in place, and the
zip's checksums, which torch computed for nothing, are corrected. What `torch.load` gives equals what it gives for
`dcp_to_torch_save`'s file. The files differ in two harmless places: `data.pkl` spells the device name once per tensor,
and `.data/serialization_id`, a fingerprint that nothing checks, is that of the empty storages.
Zip records: APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ckptool.core.box import Box
from ckptool.core.checkpoint import Manifest
from ckptool.core.parts import FileRecord, Part
from ckptool.errors import DamagedError, MismatchError, StorageError, UnsupportedError
from ckptool.formats.dcp_source import load_blob
from ckptool.storage.files import os_errors

if TYPE_CHECKING:
    from torch import Tensor
    from torch._subclasses import FakeTensorMode

_DESCRIPTOR = b"PK\x07\x08"
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of name and extra field
_DIRECTORY_RECORD = struct.Struct("<4s24xHHH12x")  # signature; lengths of name, extra field and comment


@dataclass
class _Slot:
    """Where a tensor's bytes go in the file, how many have arrived, and their checksum so far."""

    offset: int
    num_bytes: int
    written_bytes: int = 0
    crc32: int = 0


class TorchFileSink:
    """A Sink for a single .pt file, and the writer of its one part. Objects must come before the first tensor.

    The state dict is nested by `manifest.paths`; an alias is a tensor of its own there, as `dcp_to_torch_save` has it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._objects: dict[str, Any] = {}
        self._slots: dict[str, _Slot] = {}
        self._file: BinaryIO | None = None

    def open(self, part: Part) -> TorchFileSink:
        return self

    def write_object(self, fqn: str, data: bytes) -> None:
        """Take a `torch.save` blob's value into the state dict. Raises UnsafeError when it is more than plain data."""
        if self._file is not None:
            raise MismatchError(f"{self._path}: object {fqn} came after tensors were written")
        self._objects[fqn] = load_blob(data, fqn)

    def write(self, fqn: str, chunk: Box, piece: Box, data: memoryview) -> None:
        """Put a piece's bytes in place. Those of one tensor must follow one another in C order without gaps."""
        file = self._open_file()
        slot = self._slots[fqn]
        entry = self._manifest.tensors[fqn]
        start = piece.flat_start(entry.shape) * entry.itemsize_bytes
        if not data:
            return
        if start != slot.written_bytes or not piece.is_contiguous_in(entry.shape):
            raise UnsupportedError(f"{self._path}: the pieces of {fqn} did not arrive in the order of its elements")
        with os_errors(self._path):
            file.seek(slot.offset + start)
            file.write(data)
        slot.crc32 = zlib.crc32(data, slot.crc32)
        slot.written_bytes += len(data)

    def close(self) -> list[FileRecord]:
        """Correct the checksums. Raises MismatchError when a tensor was not written whole."""
        file = self._open_file()
        for fqn, slot in self._slots.items():
            if slot.written_bytes != slot.num_bytes:
                raise MismatchError(
                    f"{self._path}: {slot.written_bytes} of {slot.num_bytes} bytes of {fqn} were written"
                )
        with os_errors(self._path):
            file.flush()
            _correct_checksums(file, {slot.offset: slot for slot in self._slots.values() if slot.num_bytes})
            file.close()
            return [FileRecord(self._path.name, self._path.stat().st_size, "")]

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def finish(self, records: Sequence[FileRecord]) -> None:
        """Nothing more: the file says all itself."""

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            with os_errors(self._path):
                self._slots = self._lay_out()
                self._file = self._path.open("r+b")
        return self._file

    def _lay_out(self) -> dict[str, _Slot]:
        """Write the archive with empty storages; return every tensor's place in it."""
        import torch
        from torch.serialization import skip_data
        from torch.utils import _pytree

        with _fake_tensors():
            tensors = {
                fqn: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                for fqn, entry in self._manifest.tensors.items()
            }
        state = self._nest({**tensors, **self._objects})
        try:
            with skip_data(materialize_fake_tensors=True):
                torch.save(state, self._path)
        except RuntimeError as error:
            # torch's own writer says what the disk refused only in words.
            raise StorageError(f"{self._path} can't be written: {str(error).splitlines()[0]}") from error
        # Loading the same structure without data tells where torch put each storage.
        with _fake_tensors():
            placed = torch.load(self._path, weights_only=True)
        names = {id(tensor): fqn for fqn, tensor in tensors.items()}
        slots: dict[str, _Slot] = {}
        for ours, theirs in zip(_pytree.tree_leaves(state), _pytree.tree_leaves(placed), strict=True):
            if isinstance(ours, torch.Tensor):
                storage = theirs.untyped_storage()
                slot = _Slot(storage._checkpoint_offset, storage.nbytes())
                slots[names.get(id(ours), f"object {len(slots)}")] = slot
                if id(ours) not in names:
                    _fill(self._path, slot, ours)
        return slots

    def _nest(self, values: dict[str, Any]) -> dict[str, Any]:
        """The nested state dict, in the order of the manifest's paths."""
        from torch.distributed.checkpoint._traverse import set_element

        missing = [fqn for fqn in self._manifest.objects if fqn not in values]
        if missing:
            raise MismatchError(f"{self._path}: object {missing[0]} was not written before the tensors")
        order = {fqn: i for i, fqn in enumerate(self._manifest.paths)}
        state: dict[str, Any] = {}
        for fqn in sorted(values, key=lambda name: order.get(name, len(order))):
            set_element(state, self._manifest.paths.get(fqn, (fqn,)), values[fqn])
        return state


def _fake_tensors() -> FakeTensorMode:
    """A mode in which tensors have no memory. They are the CPU's, so no device is asked for: torch 2.11 built for CUDA
    died of a segmentation fault when it asked where the driver was there and CUDA_VISIBLE_DEVICES showed no GPU."""
    from torch._subclasses import FakeTensorMode

    class OfTheCpu(FakeTensorMode):
        avoid_device_init = False

    return OfTheCpu()


def _fill(path: Path, slot: _Slot, tensor: Tensor) -> None:
    """Write the storage of a tensor that was inside an object."""
    raw = bytes(tensor.untyped_storage().cpu())
    with path.open("r+b") as file:
        file.seek(slot.offset)
        file.write(raw)
    slot.written_bytes, slot.crc32 = len(raw), zlib.crc32(raw)


def _correct_checksums(file: BinaryIO, slots: dict[int, _Slot]) -> None:
    """Write each storage's CRC32 where a zip keeps it: in the directory, and in the descriptor after the bytes."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        position = archive.start_dir
    found = 0
    for member in members:
        file.seek(position)
        signature, name_bytes, extra_bytes, comment_bytes = _DIRECTORY_RECORD.unpack(file.read(_DIRECTORY_RECORD.size))
        file.seek(member.header_offset)
        start = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size)))
        slot = slots.get(start)
        if slot is not None:
            crc32 = struct.pack("<I", slot.crc32)
            file.seek(start + slot.num_bytes)
            descriptor = file.read(4)
            if signature != b"PK\x01\x02" or descriptor != _DESCRIPTOR or member.file_size != slot.num_bytes:
                raise DamagedError(f"{file.name}: torch laid out its archive in an unknown way")
            file.seek(start + slot.num_bytes + 4)
            file.write(crc32)
            file.seek(position + 16)
            file.write(crc32)
            found += 1
        position += _DIRECTORY_RECORD.size + name_bytes + extra_bytes + comment_bytes
    if found != len(slots):
        raise DamagedError(f"{file.name}: {len(slots) - found} storages are not where torch said")
