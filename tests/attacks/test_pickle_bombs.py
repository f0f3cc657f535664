"""Pickles of a few kilobytes that would hang, crash or fill the memory of an ordinary unpickler."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.attacks.limits import run_limited

META = b"ctorch.distributed.checkpoint.metadata\n"
PATH = b"cpathlib\nPosixPath\n"
SIZE = b"ctorch\nSize\n"


def doubled(times: int) -> bytes:
    """A tuple of two references to a tuple of two references to ...: 2**times leaves in 8 bytes a level."""
    return b")q\x00" + b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(times))


def nested(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def repeat_call(target: bytes, arguments: bytes, times: int) -> bytes:
    """Call `target` with the same large arguments again and again: each call costs 5 bytes."""
    return target + b"q\x01" + arguments + b"q\x02" + b"h\x01h\x02R0" * times + b"N."


MANY = b"(" + b"N" * 100_000 + b"t"
MANY_TEXTS = b"(" + b"X\x01\x00\x00\x00a" * 20_000 + b"t"
LARGE_STATE = b"}(" + b"".join(b"X\x08\x00\x00\x00%08dN" % i for i in range(20_000)) + b"u"
COLLIDING = b"".join(b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N" for i in range(1, 50_000))
FLOATS = b"".join(b"G" + struct.pack(">d", i * 2.0**61) + b"N" for i in range(1, 1000))

BOMBS = {
    "a key that takes 2**200 steps to hash": b"}" + doubled(200) + b"Ns.",
    "the same in a dict of protocol 0": b"(d" + doubled(200) + b"Ns.",
    "the same among many items": b"}(" + doubled(200) + b"Nu.",
    "the same built by DICT": b"(" + doubled(200) + b"Nd.",
    "the same for an OrderedDict": b"ccollections\nOrderedDict\n)R" + doubled(200) + b"Ns.",
    "the same as the items of an OrderedDict": b"ccollections\nOrderedDict\n" + doubled(200) + b"N\x86\x85\x85R.",
    "a key nested a million deep": b"}" + nested(1_000_000) + b"Ns.",
    "a frozenset": b"\x80\x04(" + doubled(200) + b"\x91.",
    "a set": b"\x80\x04\x8f(" + doubled(200) + b"\x90.",
    "integer keys of one hash": b"}(" + COLLIDING + b"u.",
    "float keys": b"}(" + FLOATS + b"u.",
    "a key of a megabyte of digits": b"}\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b"Ns.",
    "a number of a million decimal digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a path that doubles forty times": PATH
    + b"q\x00X\x01\x00\x00\x00aq\x01"
    + b"".join(b"0h\x00h%ch%c\x86Rq%c" % (i, i, i + 1) for i in range(1, 41))
    + b".",
    "a path of many parts, many times": repeat_call(PATH, MANY_TEXTS, 20_000),
    "one large dict for the fields of many records": LARGE_STATE
    + b"q\x01"
    + META
    + b"Metadata\nq\x02"
    + b"h\x02)\x81h\x01b0" * 20_000
    + b"N.",
    "a layout of many arguments, many times": repeat_call(b"ctorch.serialization\n_get_layout\n", MANY, 20_000),
    "a persistent id": doubled(200) + b"Q.",
    "a persistent id in text": b"Pid\n.",
    "an extension code": b"\x80\x02\x84" + struct.pack("<I", 2**31 - 1) + b".",
    "a name that is a tuple": b"\x80\x04" + doubled(200) + b"X\x01\x00\x00\x00a\x93.",
    "an attribute name that is a tuple": META + b"Metadata\n)\x81N}" + doubled(200) + b"Ns\x86b.",
    "a record's fields in a tuple": META + b"Metadata\n)\x81" + doubled(200) + b"b.",
    "tensor properties of a tuple": META + b"TensorProperties\n)\x81" + doubled(200) + b"\x85b.",
    "keyword arguments": PATH + b")}" + doubled(200) + b"Ns\x92.",
    "a memo of 2**32 places": b"Nr\xff\xff\xff\xff.",
    "a terabyte of text": b"\x8d" + struct.pack("<Q", 1 << 40) + b".",
}

#: Harmless only because they stay as small as they are written. The metadata they don't describe is refused later.
ALLOWED = {
    "a shape of many dims, many times": repeat_call(SIZE, MANY + b"\x85", 20_000),
    "a list nested a million deep": b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "values nested a million deep": b"}X\x01\x00\x00\x00a" + nested(1_000_000) + b"s.",
    "a value of 2**200 leaves": b"}X\x01\x00\x00\x00a" + doubled(200) + b"s.",
}

LOAD = """
import sys, pathlib
from ckptool.formats.dcp_metadata import read_manifest
from ckptool.formats.dcp_stubs import METADATA_GLOBALS
from ckptool.formats.torch_weights import _KNOWN
from ckptool.storage.safe_pickle import check_plain, load

known = {**METADATA_GLOBALS, **_KNOWN}
for file in sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name)):
    print("running", file.name, file=sys.stderr)
    raw = (file / ".metadata").read_bytes()
    print(refused(load, raw, known, "x"), refused(read_manifest, file))
    refused(check_plain, raw, "x")
"""


def test_bombs_are_refused_in_time_and_memory(tmp_path: Path) -> None:
    """By the unpickler that gives dicts; and as metadata, whose dicts come as lists, by it or by who reads them."""
    cases = {**BOMBS, **ALLOWED}
    for number, raw in enumerate(cases.values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / ".metadata").write_bytes(raw)
    outcomes = dict(zip(cases, map(str.split, run_limited(LOAD, str(tmp_path))), strict=True))
    refusals = ("DamagedError", "UnsafeError")
    assert {name: outcomes[name] for name in BOMBS if outcomes[name][0] not in refusals} == {}
    assert {name: outcomes[name] for name in ALLOWED if outcomes[name][0] != "accepted"} == {}
    assert {name: outcome for name, outcome in outcomes.items() if outcome[1] not in refusals} == {}


BOMB_IN = """
import sys, pathlib
from ckptool.formats.dcp_metadata import read_manifest
print(refused(read_manifest, pathlib.Path(sys.argv[1])))
"""


def word(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def record(name: bytes, **fields: bytes) -> bytes:
    items = b"".join(word(key.encode()) + value for key, value in fields.items())
    module = b"torch.distributed.checkpoint.filesystem" if name == b"_StorageInfo" else META[1:-1]
    return b"c" + module + b"\n" + name + b"\n)\x81}(" + items + b"ub"


def metadata_with(bomb: bytes, place: str) -> bytes:
    """Metadata of one tensor with the bomb in one place: what is read there may end up in an error message."""
    parts = {name: word(b"x") for name in ("fqn", "file", "transform", "dtype", "size", "path")} | {place: bomb}
    index = record(b"MetadataIndex", fqn=parts["fqn"], offset=b"N")
    info = record(
        b"_StorageInfo",
        relative_path=parts["file"],
        offset=b"K\x00",
        length=b"K\x00",
        transform_descriptors=parts["transform"] if place == "transform" else b"N",
    )
    properties = record(b"Metadata", dtype=parts["dtype"])
    tensor = record(b"TensorStorageMetadata", properties=properties, size=parts["size"], chunks=b"]")
    return (
        record(
            b"Metadata",
            state_dict_metadata=b"}" + word(b"x") + tensor + b"s",
            planner_data=b"}" + word(b"x") + parts["path"] + b"s",
            storage_data=b"}" + index + info + b"s",
        )
        + b"."
    )


@pytest.mark.parametrize("place", ["fqn", "file", "transform", "dtype", "size", "path"])
def test_a_value_that_takes_forever_to_print_is_not_printed(tmp_path: Path, place: str) -> None:
    (tmp_path / ".metadata").write_bytes(metadata_with(doubled(200), place))
    assert run_limited(BOMB_IN, str(tmp_path)) in (["DamagedError"], ["UnsupportedError"])
