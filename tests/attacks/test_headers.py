"""safetensors headers that lie about sizes, at small cost to the attacker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attacks.limits import run_limited

U8 = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def tensor(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[bytes, bytes]] = {
    "exabytes of header": ((1 << 62).to_bytes(8, "little"), b"{}"),
    "a header longer than the file": ((1000).to_bytes(8, "little"), b"{}"),
    "nothing": (b"", b""),
    "seven bytes": (b"1234567", b""),
}
JSONS: dict[str, object] = {
    "terabytes in a byte": {"a": tensor([1 << 40], 0, 1 << 40)},
    "a product that overflows to one": {"a": tensor([1 << 32, 1 << 32, 1], 0, 1)},
    "sizes beyond 64 bits": {"a": tensor([1 << 70, 0], 0, 0)},
    "an empty tensor of impossible dims": {"a": tensor([10**30, 0], 0, 0)},
    "negative": {"a": tensor([-1], 0, 1)},
    "backwards": {"a": tensor([1], 1, 0)},
    "floats": {"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}},
    "infinite": {"a": {"dtype": "U8", "shape": [float("inf")], "data_offsets": [0, 1]}},
    "booleans": {"a": {"dtype": "U8", "shape": [True], "data_offsets": [False, True]}},
    "strings": {"a": {"dtype": "U8", "shape": ["1"], "data_offsets": ["0", "1"]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [1]}},
    "three offsets": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}},
    "dtype of another type": {"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}},
    "unknown dtype": {"a": {"dtype": "U9", "shape": [1], "data_offsets": [0, 1]}},
    "shared bytes": {"a": U8, "b": U8},
    "a hole": {"a": tensor([1], 1, 2)},
    "not a record": {"a": 5},
    "metadata of numbers": {"__metadata__": {"x": 1}, "a": U8},
    "metadata of another type": {"__metadata__": 5, "a": U8},
    "thousands of dims": {"a": tensor([1] * 100_000, 0, 1)},
}
RAW_JSONS = {
    "one name twice": b'{"a":' + json.dumps(U8).encode() + b',"a":' + json.dumps(U8).encode() + b"}",
    "deep nesting": b"[" * 1_000_000,
    "a number without end": b'{"a":' + b"9" * 1_000_000 + b"}",
    "no JSON": b"\xff\xfe\x00",
    "a list": b"[]",
    "lone surrogates": b'{"\\ud800": 5}',
}

READ = """
import sys, pathlib
from ckptool.formats.safetensors_file import read_header
from ckptool.storage.files import RangeReader

for file in sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda path: int(path.stem)):
    print(refused(read_header, RangeReader(file.parent), file.name))
"""


def test_lying_headers_are_refused_in_time_and_memory(tmp_path: Path) -> None:
    contents = {name: length + rest for name, (length, rest) in HEADERS.items()}
    for name, raw in [*((n, json.dumps(h).encode()) for n, h in JSONS.items()), *RAW_JSONS.items()]:
        contents[name] = len(raw).to_bytes(8, "little") + raw + b"\0"
    for number, raw in enumerate(contents.values()):
        (tmp_path / f"{number}.safetensors").write_bytes(raw)
    outcomes = dict(zip(contents, run_limited(READ, str(tmp_path)), strict=True))
    assert {name: o for name, o in outcomes.items() if o not in ("DamagedError", "UnsupportedError")} == {}


def test_a_pretty_printed_header_of_many_names_is_read(tmp_path: Path) -> None:
    header = {f"t{i}": tensor([1], i, i + 1) for i in range(20_000)}
    raw = json.dumps(header, indent=2).encode()
    (tmp_path / "0.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(20_000))
    assert run_limited(READ, str(tmp_path)) == ["accepted"]


@pytest.mark.parametrize("dims", [[1 << 62, 1 << 62, 0], [0, 1 << 62]])
def test_empty_tensors_of_absurd_dims_go_through_or_are_refused(tmp_path: Path, dims: list[int]) -> None:
    raw = json.dumps({"a": tensor(dims, 0, 0, "F32")}).encode()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    from ckptool.cli.main import run

    code = run(["import-hf", str(tmp_path / "model"), "x", "--root", str(tmp_path / "ckpt"), "--quiet"])
    assert code in (0, 3, 4)
    if code == 0:
        assert run(["export", "x", "--root", str(tmp_path / "ckpt"), "--quiet"]) in (0, 3, 4)
