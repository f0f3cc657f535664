import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from ckptool.core.box import Box
from ckptool.core.tensors import Chunk, TensorEntry
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.safetensors_file import TORCH_NAMES, build_header, layout_order, read_header
from ckptool.storage.files import RangeReader


def entry(fqn: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(fqn, dtype, shape, (Chunk(Box.whole(shape)),))


def write_raw(folder: Path, header: object, payload: bytes = b"") -> RangeReader:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
    return RangeReader(folder)


def test_golden_header() -> None:
    header, offsets = build_header([entry("a", "float32", ()), entry("b", "bfloat16", (2, 3))])
    text = (
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]}}'
    )
    text += b" " * (-len(text) % 8)
    assert header == len(text).to_bytes(8, "little") + text
    assert offsets == {"a": len(header), "b": len(header) + 4}


def test_header_equals_the_librarys_for_every_dtype() -> None:
    torch_dtypes = {name: getattr(torch, name, None) for name in TORCH_NAMES.values()}
    tensors = {
        f"t{i % 3}.{name}": torch.zeros(2, 3, dtype=torch.uint8).to(dtype) if name != "float8_e8m0fnu" else None
        for i, (name, dtype) in enumerate(torch_dtypes.items())
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    reference = save(tensors, {"format": "pt"})
    entries = [entry(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()]
    ours, _ = build_header(sorted(entries, key=layout_order))
    assert reference[: len(ours)] == ours


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 5), "n": torch.arange(4), "s": torch.tensor(2.5), "e": torch.zeros(0, 7)}
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    entries, metadata = read_header(RangeReader(tmp_path), "m.safetensors")
    assert metadata == {"format": "pt"}
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        "w": ("float32", (3, 5)),
        "n": ("int64", (4,)),
        "s": ("float32", ()),
        "e": ("float32", (0, 7)),
    }


@pytest.mark.parametrize(
    ("header", "payload", "says"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "truncated"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"123456789", "truncated"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678", "needs 12 bytes"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"12345678", "impossible"),
        ({"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 8]}}, b"12345678", "impossible"),
        ({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}}, b"12345678", "impossible"),
        ({"a": [1]}, b"", "no dtype"),
        ({"__metadata__": {"a": 1}}, b"", "map of strings"),
        (b"[]", b"", "not a JSON object"),
        (b"{", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
            "twice",
        ),
        (
            {
                "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            },
            b"123",
            "overlap",
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: object, payload: bytes, says: str) -> None:
    with pytest.raises(DamagedError, match=says):
        read_header(write_raw(tmp_path, header, payload), "x.safetensors")


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedError, match="claims"):
        read_header(RangeReader(tmp_path), "x.safetensors")


def test_a_dtype_that_torch_lacks_is_named(tmp_path: Path) -> None:
    reader = write_raw(tmp_path, {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123")
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        read_header(reader, "x.safetensors")


@given(st.binary(max_size=200), st.integers(0, 300))
@settings(max_examples=200)
def test_any_bytes_give_our_own_error_or_a_result(tmp_path_factory: pytest.TempPathFactory, raw: bytes, n: int) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "x.safetensors").write_bytes(n.to_bytes(8, "little") + raw)
    try:
        entries, _ = read_header(RangeReader(folder), "x.safetensors")
    except CkptoolError:
        return
    assert all(e.num_bytes <= len(raw) for e in entries.values())
