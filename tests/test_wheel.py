"""What `pip install` would get."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, copy)
    for name in ("ckptool", "trainer"):
        shutil.copytree(TOP / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    script = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (wheel,) = (copy / "dist").glob("ckptool-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module(wheel_files: set[str]) -> None:
    modules = {str(path.relative_to(TOP)) for name in ("ckptool", "trainer") for path in (TOP / name).rglob("*.py")}
    assert modules <= wheel_files


def test_the_wheel_holds_the_parts_of_the_report_page(wheel_files: set[str]) -> None:
    template = {str(path.relative_to(TOP)) for path in (TOP / "ckptool/ops/report/template").iterdir()}
    assert len(template) == 3
    assert template <= wheel_files
