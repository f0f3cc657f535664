"""The format that docs/howto/add-a-format.md writes is one: it reads every box as NumPy does, and refuses the rest."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.errors import DamagedError, NotFoundError, UnsupportedError
from tests.docs.pages import TOP

SHAPE = (5, 3, 4)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's file, as if it lay beside the other formats."""
    page = (TOP / "docs" / "howto" / "add-a-format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("format") / "npy_folder.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("npy_folder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["npy_folder"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npy")
    np.save(folder / "w.npy", np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE))
    np.save(folder / "scale.npy", np.array(2.5, dtype=np.float64))
    return folder


def test_the_manifest_is_exact(example: ModuleType, folder: Path) -> None:
    manifest = example.NpyFolder(folder).manifest
    manifest.check_cover()
    assert {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()} == {
        "w": ("float32", SHAPE),
        "scale": ("float64", ()),
    }
    (chunk,) = manifest.tensors["w"].chunks
    assert chunk.locator is not None
    stored = (folder / chunk.locator.file).read_bytes()[chunk.locator.offset :][: chunk.locator.length]
    assert stored == np.load(folder / "w.npy").tobytes()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_box_is_read_as_numpy_reads_it(example: ModuleType, folder: Path, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in SHAPE)
    sizes = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(SHAPE, offsets, strict=True))
    out = bytearray(4 * int(np.prod(sizes)))
    example.NpyFolder(folder).read_into("w", Box(offsets, sizes), memoryview(out))
    part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    assert bytes(out) == np.load(folder / "w.npy")[part].tobytes()


def test_what_it_does_not_understand_is_refused(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no \.npy file"):
        example.NpyFolder(tmp_path)
    np.save(tmp_path / "w.npy", np.zeros(3, dtype=np.complex64))
    with pytest.raises(UnsupportedError, match="complex64"):
        example.NpyFolder(tmp_path)
    np.save(tmp_path / "w.npy", np.array([{}], dtype=object))
    with pytest.raises(DamagedError, match=r"no \.npy file of numbers"):
        example.NpyFolder(tmp_path)
    np.save(tmp_path / "w.npy", np.zeros((50, 50)))
    (tmp_path / "w.npy").write_bytes((tmp_path / "w.npy").read_bytes()[:1000])
    with pytest.raises(DamagedError, match=r"no \.npy file of numbers"):
        example.NpyFolder(tmp_path)
