"""Tensors of every type that the gguf library dequantises, read in pieces."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy
import pytest

from ckptool.core.box import Box
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.gguf_file import GgufSource

READABLE = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
]


def write(path: Path, tensors: dict[str, tuple[numpy.ndarray, str]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str) -> numpy.ndarray:
    """11 rows of 2 blocks each, of any bytes, but with the scales' exponents small, so that all numbers are finite."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = numpy.random.default_rng(0).integers(0, 0x3C, (11, 2 * block_bytes), dtype=numpy.uint8)
    plain = {"F32": numpy.float32, "F16": numpy.float16}.get(kind)
    return data.view(plain) if plain else data


@pytest.mark.parametrize("kind", READABLE)
def test_rows_are_what_the_library_makes_of_the_whole(tmp_path: Path, kind: str) -> None:
    data = random_blocks(kind)
    source = GgufSource(write(tmp_path / "x.gguf", {"w": (data, kind)}))
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    entry = source.manifest.tensors["w"]
    assert (entry.dtype, entry.shape) == ("float32", expected.shape)
    parts = []
    for box in Box.whole(entry.shape).split_rows(4):
        part = bytearray(box.num_elements * 4)
        source.read_into("w", box, memoryview(part))
        parts.append(numpy.frombuffer(part, numpy.float32).reshape(box.sizes))
    assert numpy.array_equal(numpy.concatenate(parts), expected, equal_nan=True)
    assert numpy.isfinite(expected).any()


def test_a_type_that_can_not_be_dequantised_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", {"w": (numpy.zeros((2, 3), dtype=numpy.int32), "I32")})
    with pytest.raises(UnsupportedError, match="type I32"):
        GgufSource(path)


def test_flipped_bytes_are_never_an_unplanned_error(tmp_path: Path) -> None:
    raw = write(
        tmp_path / "x.gguf", {"w": (random_blocks("Q4_0"), "Q4_0"), "n": (random_blocks("F32"), "F32")}
    ).read_bytes()
    random.seed(2)
    outcomes = set()
    for _ in range(200):
        changed = bytearray(raw)
        changed[random.randrange(300)] ^= 1 << random.randrange(8)
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            GgufSource(tmp_path / "x.gguf")
            outcomes.add("read")
        except CkptoolError as error:
            assert "\n" not in str(error)
            outcomes.add(type(error).__name__)
    assert outcomes <= {"read", DamagedError.__name__, UnsupportedError.__name__}
    assert DamagedError.__name__ in outcomes
