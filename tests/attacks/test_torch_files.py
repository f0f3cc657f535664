"""pytorch_model.bin from a stranger: pickles that would run, hang or fill memory, in both of torch's forms."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import torch

from tests.attacks.limits import run_limited

DOUBLED = b")q\x00" + b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(200))
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"

PICKLES = {
    "code": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "a key that takes forever to hash": b"\x80\x02}" + DOUBLED + b"Ns.",
    "a key of an OrderedDict": b"\x80\x02ccollections\nOrderedDict\n)R" + DOUBLED + b"Ns.",
    "an OrderedDict of itself": b"\x80\x02ccollections\nOrderedDict\n](Ne\x85R.",
    "a million deep": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "a memo without end": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytes without end": b"\x80\x02\x8e" + b"\xff" * 7 + b"\x7f.",
    "an integer without end": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a tensor of a string": b"\x80\x02}X\x01\x00\x00\x00a" + REBUILD + b"(X\x01\x00\x00\x00sK\x00)))Nt\x81s.",
    "a storage key that is a list": b"\x80\x02}X\x01\x00\x00\x00a(X\x07\x00\x00\x00storageNN]K\x01tQs.",
    "not a dict": b"\x80\x02K\x07.",
    "nothing": b"",
    "no end": b"\x80\x02" + b"N" * 100_000,
}

LOAD = """
import sys, pathlib
from ckptool.formats.torch_weights import TorchWeights
from ckptool.storage.files import RangeReader
folder = pathlib.Path(sys.argv[1])
for file in sorted(folder.iterdir(), key=lambda path: int(path.stem)):
    print(refused(TorchWeights, RangeReader(folder), file.name))
"""


def as_zip(raw: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("archive/data.pkl", raw)
    return out.getvalue()


def as_old(raw: bytes) -> bytes:
    out = io.BytesIO()
    torch.save({}, out, _use_new_zipfile_serialization=False)
    state = pickle.dumps({}, 2)
    assert out.getvalue().count(state) == 1
    return out.getvalue().replace(state, raw)


def test_all_are_refused_in_time_and_memory(tmp_path: Path) -> None:
    files = {f"{name}, {form.__name__}": form(raw) for name, raw in PICKLES.items() for form in (as_zip, as_old)}
    files["a zip bomb"] = as_zip(pickle.dumps(bytes(200_000_000)), zipfile.ZIP_DEFLATED)
    for number, content in enumerate(files.values()):
        (tmp_path / f"{number}.bin").write_bytes(content)
    outcomes = dict(zip(files, run_limited(LOAD, str(tmp_path)), strict=True))
    refusals = ("DamagedError", "UnsafeError", "UnsupportedError")
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in refusals} == {}
    assert outcomes["code, as_zip"] == outcomes["code, as_old"] == "UnsafeError"
