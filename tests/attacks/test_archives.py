"""Zip tricks: in stored chunks, which ckptool reads itself, and in objects, which torch unpacks."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.core.tensors import Locator
from ckptool.errors import CkptoolError, DamagedError, UnsafeError
from ckptool.formats.dcp_entry import read_entry
from ckptool.formats.dcp_source import load_blob
from ckptool.storage.files import RangeReader
from tests.attacks.limits import run_limited


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rezip(blob: bytes, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change.get(name.partition("/")[2], old.read(name)))
    return out.getvalue()


CHUNK = saved(torch.arange(64, dtype=torch.float32))
OBJECT = saved({"lr": 0.1, "steps": [1, 2, 3], 5: "five"})
BOMB = rezip(saved(bytes(16)), {"data.pkl": pickle.dumps(bytes(200_000_000))}, zipfile.ZIP_DEFLATED)


def read_chunk(tmp_path: Path, blob: bytes, length: int | None = None) -> object:
    (tmp_path / "__0_0.distcp").write_bytes(b"other" * 100 + blob + b"other" * 100)
    return read_entry(RangeReader(tmp_path), Locator("__0_0.distcp", 500, len(blob) if length is None else length))


def directory_field(blob: bytes, member: str, offset: int, value: bytes) -> bytes:
    """The archive with some bytes of a member's directory record replaced. APPNOTE.TXT 4.3.12 has the offsets."""
    record = blob.rindex(member.encode()) - 46
    assert blob[record : record + 4] == b"PK\x01\x02"
    return blob[: record + offset] + value + blob[record + offset + len(value) :]


def twice(blob: bytes) -> bytes:
    out = io.BytesIO(rezip(blob, {}))
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data.pkl", pickle.dumps(1))
    return out.getvalue()


def wide_directory(blob: bytes, num_bytes: int) -> bytes:
    """The end record says that the directory is this long."""
    end = blob.rindex(b"PK\x05\x06")
    return blob[: end + 12] + struct.pack("<I", num_bytes) + blob[end + 16 :]


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(rezip(CHUNK, {}, zipfile.ZIP_DEFLATED), id="compressed"),
        pytest.param(rezip(CHUNK, {"data/0": bytes(10_000_000)}, zipfile.ZIP_DEFLATED), id="bomb"),
        pytest.param(directory_field(CHUNK, "archive/data/0", 42, struct.pack("<I", 1 << 30)), id="payload outside"),
        pytest.param(directory_field(CHUNK, "archive/data/0", 42, struct.pack("<I", 0)), id="payload elsewhere"),
        pytest.param(directory_field(CHUNK, "archive/data/0", 20, struct.pack("<II", 1 << 30, 1 << 30)), id="long"),
        pytest.param(directory_field(CHUNK, "archive/data/0", 20, struct.pack("<II", 256, 1 << 30)), id="two sizes"),
        pytest.param(directory_field(CHUNK, "archive/data.pkl", 20, struct.pack("<II", 1 << 30, 1 << 30)), id="pickle"),
        pytest.param(wide_directory(rezip(CHUNK, {}), 0xFFFFFFF0), id="directory of gigabytes"),
        pytest.param(wide_directory(rezip(CHUNK, {}), 20), id="directory cut"),
        pytest.param(b"PK\x05\x06" + bytes(18), id="no members"),
        pytest.param(CHUNK + bytes(70_000), id="padded"),
    ],
)
def test_tricks_in_a_chunk(tmp_path: Path, blob: bytes) -> None:
    with pytest.raises(DamagedError) as caught:
        read_chunk(tmp_path, blob)
    assert caught.value.exit_code == 4


def test_two_members_of_one_name_in_a_chunk(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="two members of one name"):
        read_chunk(tmp_path, twice(CHUNK))


def test_a_chunk_that_ends_early_or_beyond_its_file(tmp_path: Path) -> None:
    for length in (0, 1, 21, len(CHUNK) - 1, len(CHUNK) + 10_000):
        with pytest.raises(DamagedError):
            read_chunk(tmp_path, CHUNK, length)


def test_objects_of_plain_data_pass() -> None:
    assert load_blob(OBJECT, "x") == {"lr": 0.1, "steps": [1, 2, 3], 5: "five"}
    state = {"rng": torch.get_rng_state(), "dtype": torch.bfloat16, "nested": [{"a": (1, None)}]}
    assert load_blob(saved(state), "x")["nested"] == [{"a": (1, None)}]


def test_two_members_of_one_name_in_an_object() -> None:
    with pytest.raises(DamagedError, match="two members of one name"):
        load_blob(twice(OBJECT), "x")


def with_pickle(raw: bytes) -> bytes:
    return rezip(OBJECT, {"data.pkl": raw})


DOUBLED = b")q\x00" + b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(200))

OBJECTS = {
    "bomb": BOMB,
    "a key that takes forever to hash": with_pickle(b"\x80\x02}" + DOUBLED + b"Ns."),
    "a key in an OrderedDict": with_pickle(b"\x80\x02ccollections\nOrderedDict\n)R" + DOUBLED + b"Ns."),
    "a key a million deep": with_pickle(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."),
    "a set": with_pickle(b"\x80\x02c__builtin__\nset\n]" + DOUBLED + b"a\x85R."),
    "code": with_pickle(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."),
    "a memo without end": with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "nothing": b"",
    "not a zip": b"PK\x03\x04 and no more",
}

LOAD = """
import sys, pathlib
from ckptool.formats.dcp_source import load_blob
import torch  # before the limit on memory counts
import resource
for file in sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name)):
    print(refused(load_blob, file.read_bytes(), "x"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_objects_that_would_hang_crash_or_run_something(tmp_path: Path) -> None:
    for number, blob in enumerate(OBJECTS.values()):
        (tmp_path / str(number)).write_bytes(blob)
    *lines, max_kilobytes = run_limited(LOAD, str(tmp_path), memory_bytes=8 << 30, seconds=60)
    outcomes = dict(zip(OBJECTS, lines, strict=True))
    assert {name: o for name, o in outcomes.items() if o not in ("DamagedError", "UnsafeError")} == {}
    assert outcomes["code"] == "UnsafeError"
    assert int(max_kilobytes) < 1_000_000


def test_flipped_bytes_of_an_object_are_never_an_unplanned_error() -> None:
    outcomes = set()
    for i in range(0, len(OBJECT), 5):
        try:
            load_blob(OBJECT[:i] + bytes([OBJECT[i] ^ 0x5A]) + OBJECT[i + 1 :], "x")
            outcomes.add("read")
        except CkptoolError as error:
            outcomes.add(type(error).__name__)
    assert outcomes <= {"read", DamagedError.__name__, UnsafeError.__name__}
    assert DamagedError.__name__ in outcomes
