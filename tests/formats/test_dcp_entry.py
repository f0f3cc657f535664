"""Stored chunks: torch's archives are located exactly, and forged ones are refused."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.core.dtypes import ITEMSIZE_BYTES
from ckptool.core.tensors import Locator
from ckptool.errors import CkptoolError, DamagedError, UnsafeError, UnsupportedError
from ckptool.formats import dcp_entry
from ckptool.formats.dcp_entry import StoredTensor, read_entry
from ckptool.storage.files import RangeReader

PREFIX = b"bytes of another entry"


def saved(tensor: torch.Tensor, **options: Any) -> bytes:
    blob = io.BytesIO()
    torch.save(tensor, blob, **options)
    return blob.getvalue()


def locate(folder: Path, blob: bytes) -> StoredTensor:
    (folder / "f").write_bytes(PREFIX + blob + b"and of one more")
    return read_entry(RangeReader(folder), Locator("f", len(PREFIX), len(blob)))


def payload(folder: Path, stored: StoredTensor) -> bytes:
    return (folder / "f").read_bytes()[stored.payload_offset :][: stored.payload_bytes]


@pytest.mark.parametrize("name", [name for name in ITEMSIZE_BYTES if hasattr(torch, name)])
def test_every_dtype(tmp_path: Path, name: str) -> None:
    raw = bytes(range(48)) if name != "bool" else bytes([0, 1] * 24)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, name)).reshape(3, -1)
    stored = locate(tmp_path, saved(tensor))
    assert (stored.dtype, stored.shape) == (name, tuple(tensor.shape))
    assert payload(tmp_path, stored) == raw
    assert stored.crc32 == zlib.crc32(raw)
    assert stored.is_contiguous


@pytest.mark.parametrize(
    ("tensor", "contiguous"),
    [
        (torch.tensor(1.5), True),
        (torch.empty(0, 3), True),
        (torch.arange(6.0).reshape(2, 3).t(), False),
        (torch.arange(24.0).reshape(2, 3, 4).permute(1, 0, 2), False),
        (torch.arange(6.0).reshape(1, 6).t(), True),
        (torch.arange(10.0)[3:7], True),
        (torch.arange(10.0)[::2], False),
        (torch.ones(1).expand(5), False),
    ],
)
def test_views(tmp_path: Path, tensor: torch.Tensor, contiguous: bool) -> None:
    stored = locate(tmp_path, saved(tensor))
    assert (stored.shape, stored.stride) == (tuple(tensor.shape), tensor.stride())
    assert stored.storage_offset == tensor.storage_offset()
    assert stored.is_contiguous is contiguous


def test_the_payload_is_not_read(tmp_path: Path) -> None:
    num_bytes_read = 0

    class Counting(RangeReader):
        def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
            nonlocal num_bytes_read
            num_bytes_read += len(out)
            super().read_into(name, offset_bytes, out)

    blob = saved(torch.zeros(10_000_000, dtype=torch.uint8))
    (tmp_path / "f").write_bytes(blob)
    assert read_entry(Counting(tmp_path), Locator("f", 0, len(blob))).payload_bytes == 10_000_000
    assert num_bytes_read < 10_000


def rezip(blob: bytes, change: dict[str, bytes], **options: Any) -> bytes:
    """The archive written anew by Python's zipfile, some members replaced."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w", **options) as new:
        for name in old.namelist():
            content = change.get(name.partition("/")[2], old.read(name))
            if content:
                new.writestr(name, content)
    return out.getvalue()


def data_pickle(blob: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return archive.read("archive/data.pkl")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


GOOD = saved(torch.arange(8, dtype=torch.int32).reshape(2, 4))


def with_pickle(old: bytes, new: bytes) -> bytes:
    raw = data_pickle(GOOD)
    assert old in raw
    return rezip(GOOD, {"data.pkl": raw.replace(old, new)})


def with_directory_bytes(offset_in_record: int, value: bytes) -> bytes:
    """GOOD with some bytes of the storage's record in the zip directory replaced."""
    record = GOOD.rindex(b"archive/data/0") - 46
    assert GOOD[record : record + 4] == b"PK\x01\x02"
    at = record + offset_in_record
    return GOOD[:at] + value + GOOD[at + len(value) :]


def two_members_of_one_name() -> bytes:
    out = io.BytesIO(rezip(GOOD, {}))
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data/0", bytes(32))
    return out.getvalue()


def conjugated() -> bytes:
    return saved(torch.ones(2, dtype=torch.complex64).conj())


FORGED: list[tuple[str, Callable[[], bytes], type[CkptoolError], str]] = [
    ("empty", lambda: b"", DamagedError, "not a whole torch.save archive"),
    ("garbage", lambda: os.urandom(2000), DamagedError, "not a whole torch.save archive"),
    ("cut", lambda: GOOD[:-30], DamagedError, "not a whole torch.save archive"),
    ("headless", lambda: GOOD[200:], DamagedError, "not a whole"),
    ("old format", lambda: saved(torch.ones(2), _use_new_zipfile_serialization=False), DamagedError, "not a whole"),
    ("compressed", lambda: rezip(GOOD, {}, compression=zipfile.ZIP_DEFLATED), DamagedError, "compressed"),
    ("no storage", lambda: rezip(GOOD, {"data/0": b""}), DamagedError, "lacks its tensor's storage"),
    ("no pickle", lambda: rezip(GOOD, {"data.pkl": b""}), DamagedError, "0 data.pkl"),
    ("short storage", lambda: rezip(GOOD, {"data/0": bytes(31)}), DamagedError, "has 31 bytes"),
    ("long storage", lambda: rezip(GOOD, {"data/0": bytes(33)}), DamagedError, "has 33 bytes"),
    ("big-endian", lambda: rezip(GOOD, {"byteorder": b"big"}), UnsupportedError, "big-endian"),
    ("runs code", lambda: rezip(GOOD, {"data.pkl": pickle.dumps(Evil())}), UnsafeError, "system"),
    ("no tensor", lambda: rezip(GOOD, {"data.pkl": pickle.dumps(5)}), DamagedError, "other than one tensor"),
    ("offset", lambda: with_pickle(b"QK\x00", b"QK\x07"), DamagedError, "larger than its storage"),
    ("shape", lambda: with_pickle(b"K\x02K\x04\x86", b"K\x03K\x04\x86"), DamagedError, "larger than its storage"),
    ("stride", lambda: with_pickle(b"K\x04K\x01\x86", b"K\x05K\x01\x86"), DamagedError, "larger than its storage"),
    ("dims", lambda: with_pickle(b"K\x04K\x01\x86", b"K\x01\x85"), DamagedError, "impossible"),
    ("negative", lambda: with_pickle(b"QK\x00", b"QJ\xff\xff\xff\xff"), DamagedError, "impossible"),
    ("dtype", lambda: with_pickle(b"IntStorage", b"LongStorage"), DamagedError, "says 64"),
    ("key", lambda: with_pickle(b"X\x01\x00\x00\x000", b"X\x05\x00\x00\x00../.."), DamagedError, "lacks"),
    ("twice", two_members_of_one_name, DamagedError, "two members of one name"),
    ("size", lambda: with_directory_bytes(20, struct.pack("<II", 90_000, 90_000)), DamagedError, "beyond its archive"),
    ("other header", lambda: with_directory_bytes(42, struct.pack("<I", 0)), DamagedError, "disagree"),
    ("encrypted", lambda: with_directory_bytes(8, struct.pack("<H", 0x809)), DamagedError, "encrypted"),
    ("conjugate view", conjugated, UnsupportedError, "conjugate"),
]


@pytest.mark.parametrize(("blob", "kind", "says"), [case[1:] for case in FORGED], ids=[case[0] for case in FORGED])
def test_forged_archives(tmp_path: Path, blob: Callable[[], bytes], kind: type[CkptoolError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        locate(tmp_path, blob())
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_every_flipped_byte_is_harmless_or_noticed(tmp_path: Path) -> None:
    expected = locate(tmp_path, GOOD)
    refused = 0
    for i in range(0, len(GOOD), 7):
        try:
            stored = locate(tmp_path, GOOD[:i] + bytes([GOOD[i] ^ 0xFF]) + GOOD[i + 1 :])
        except CkptoolError:
            refused += 1
        else:
            assert stored.payload_offset + stored.payload_bytes <= len(PREFIX) + len(GOOD)
            assert stored.payload_bytes == expected.payload_bytes
    assert refused > 20


def outcome(folder: Path, blob: bytes) -> StoredTensor | str:
    try:
        return locate(folder, blob)
    except CkptoolError as error:
        return f"{type(error).__name__}: {error}"


def test_archives_like_one_that_was_read_are_taken_for_what_they_are(tmp_path: Path) -> None:
    tensors = [torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 8, dtype=torch.float64)[:8]]
    dcp_entry._samples.clear()
    for tensor in (*tensors, *tensors):
        stored = locate(tmp_path, saved(tensor.clone()))
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert payload(tmp_path, stored) == tensor.numpy().tobytes()
        assert stored.crc32 == zlib.crc32(tensor.numpy().tobytes())


def test_a_changed_archive_is_not_taken_for_like_one_that_was_read(tmp_path: Path) -> None:
    """Every fourth byte around the payload, flipped: the same outcome as without the memory of a good one."""
    good = saved(torch.zeros(16, 8))
    start = locate(tmp_path, good).payload_offset - len(PREFIX)
    for place in [*range(0, start, 4), *range(start + 512, len(good), 4)]:
        bad = good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :]
        dcp_entry._samples.clear()
        alone = outcome(tmp_path, bad)
        dcp_entry._samples.clear()
        locate(tmp_path, good)
        assert outcome(tmp_path, bad) == alone, place
