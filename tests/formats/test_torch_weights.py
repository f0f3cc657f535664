"""Both forms of torch.save, read in pieces without loading them."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.core.box import Box
from ckptool.errors import CkptoolError, DamagedError, UnsafeError, UnsupportedError
from ckptool.formats.torch_weights import TorchWeights
from ckptool.storage.files import RangeReader

FORMS = pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "before 1.6"])


def save(value: Any, path: Path, as_zip: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=as_zip)
    return path


def read(path: Path, max_rows: int = 1 << 30) -> dict[str, torch.Tensor]:
    weights = TorchWeights(RangeReader(path.parent), path.name)
    tensors = {}
    for name, entry in weights.tensors.items():
        data = bytearray()
        for box in Box.whole(entry.shape).split_rows(max_rows):
            part = bytearray(box.num_elements * entry.itemsize_bytes)
            weights.read_into(name, box, memoryview(part))
            data += part
        flat = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)) if data else torch.empty(0)
        tensors[name] = flat.view(entry.shape) if data else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return tensors


def a_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(12, 7)
    tensors = {
        "plain": whole,
        "shared": whole,
        "rows": whole[3:9],
        "transposed": torch.randn(5, 11).t(),
        "one column": whole[:, 2],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "spread": torch.ones(1, 6).expand(4, 6),
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
        tensors[str(dtype)] = torch.randint(0, 2, (4, 3)).to(dtype)
    return tensors


@FORMS
@pytest.mark.parametrize("max_rows", [1, 5, 1000])
def test_every_tensor_is_what_torch_loads(tmp_path: Path, as_zip: bool, max_rows: int) -> None:
    path = save(a_model(), tmp_path / "w.bin", as_zip)
    expected = torch.load(path, weights_only=True)
    found = read(path, max_rows)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@FORMS
def test_a_modules_state_dict_and_newer_dtypes(tmp_path: Path, as_zip: bool) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()
    assert state._metadata  # an OrderedDict with an attribute
    if as_zip:
        state["fp8"] = torch.randn(4, 4).to(torch.float8_e4m3fn)
        state["uint16"] = torch.tensor([1, 2, 65535], dtype=torch.uint16)
    path = save(state, tmp_path / "w.bin", as_zip)
    assert {n: t.tolist() for n, t in read(path).items()} == {n: t.tolist() for n, t in state.items()}


@FORMS
def test_a_device_of_the_writer_means_nothing(tmp_path: Path, as_zip: bool) -> None:
    path = save({"a": torch.arange(6.0)}, tmp_path / "w.bin", as_zip)
    raw = path.read_bytes()
    assert raw.count(b"X\x03\x00\x00\x00cpu") == 1
    if not as_zip:  # a zip would also need its checksums corrected
        path.write_bytes(raw.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7"))
    assert torch.equal(read(path)["a"], torch.arange(6.0))


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this was run",))


@FORMS
def test_code_is_not_run(tmp_path: Path, as_zip: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path = save({"a": torch.ones(2), "b": Evil()}, tmp_path / "w.bin", as_zip)
    with pytest.raises(UnsafeError, match=r"print.*nothing was run") as caught:
        read(path)
    assert caught.value.exit_code == 5
    assert "this was run" not in capsys.readouterr().out


@FORMS
@pytest.mark.parametrize("value", [{"model": {"a": torch.ones(1)}}, {"a": torch.ones(1), "step": 3}, torch.ones(1), 7])
def test_anything_but_tensors_under_names_is_refused(tmp_path: Path, as_zip: bool, value: Any) -> None:
    with pytest.raises(UnsupportedError, match="holds"):
        read(save(value, tmp_path / "w.bin", as_zip))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"model": {"w": torch.ones(2)}}, "'model' is a dict"),
        ({"model": [torch.ones(2)]}, "'model' is a list"),
        (torch.ones(2), "holds a tensor, not"),
        ({"w": torch.ones(2).untyped_storage()}, "'w' is a storage"),
    ],
)
def test_what_a_file_holds_is_said_in_its_own_words(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(save(value, tmp_path / "x.pt", True))


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(100, 3), "t": torch.zeros(5, 4).t()}, tmp_path / "w.bin", as_zip=True)
    sound = path.read_bytes()
    for name in ("a", "t"):
        weights = TorchWeights(RangeReader(tmp_path), path.name)
        locator = weights.tensors[name].chunks[0].locator
        assert locator is not None
        raw = bytearray(sound)
        raw[locator.offset + 37] ^= 1
        path.write_bytes(raw)
        with pytest.raises(DamagedError, match=f"bytes of {name} have changed"):
            read(path, max_rows=7)


@FORMS
def test_a_file_cut_anywhere_is_damaged(tmp_path: Path, as_zip: bool) -> None:
    path = save({"a": torch.randn(5, 4)}, tmp_path / "w.bin", as_zip)
    raw = path.read_bytes()
    for length in {*range(0, len(raw), 13), len(raw) - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises(DamagedError):
            read(path)


@FORMS
def test_flipped_bytes_are_never_an_unplanned_error(tmp_path: Path, as_zip: bool) -> None:
    path = save(a_model(), tmp_path / "w.bin", as_zip)
    raw = path.read_bytes()
    outcomes = set()
    random.seed(1)
    for _ in range(400):
        changed = bytearray(raw)
        changed[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        try:
            read(path)
            outcomes.add("read")
        except CkptoolError as error:
            assert "\n" not in str(error)
            outcomes.add(type(error).__name__)
    assert outcomes <= {"read", "DamagedError", "UnsafeError", "UnsupportedError"}
    assert "DamagedError" in outcomes


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps(1), pickle.dumps(0x1950A86A20F9469CFC6C) * 5])
def test_other_files(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.bin").write_bytes(raw)
    with pytest.raises((DamagedError, UnsupportedError)):
        read(tmp_path / "w.bin")
