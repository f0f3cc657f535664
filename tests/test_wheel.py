"""What `pip install` would get: a wheel with everything in it, that works where the repository is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

import ckptool
from tests.tiny_models import llama
from tests.trainer.tiny import make_tokenizer

TOP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, copy)
    for name in ("ckptool", "trainer"):
        shutil.copytree(TOP / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    script = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", script], cwd=copy, check=True, capture_output=True)
    (found,) = (copy / "dist").glob("ckptool-*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_and_no_test(names: set[str]) -> None:
    modules = {str(path.relative_to(TOP)) for name in ("ckptool", "trainer") for path in (TOP / name).rglob("*.py")}
    assert modules | {"ckptool/py.typed", "trainer/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_the_wheel_holds_the_parts_of_the_report_page(names: set[str]) -> None:
    template = {str(path.relative_to(TOP)) for path in (TOP / "ckptool/ops/report/template").iterdir()}
    assert len(template) == 3
    assert template <= names


def test_the_wheel_has_its_version_its_licence_and_its_extras(wheel: Path, names: set[str]) -> None:
    folder = f"ckptool-{ckptool.__version__}.dist-info"
    assert f"{folder}/licenses/LICENSE" in names
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    assert metadata["Version"] == ckptool.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])


def test_an_installed_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Installed beside the libraries of this environment, into a folder of its own: import, train a step, export."""
    place, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    llama(vocab_size=260).save_pretrained(work / "hf")
    make_tokenizer().save_pretrained(work / "hf")
    (work / "text.txt").write_text("what is said here " * 10)
    environment = os.environ | {"PYTHONPATH": str(place), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=work, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ckpt(*arguments: str) -> str:
        return python(str(place / "bin" / "ckptool"), *arguments)

    found = python("-c", "import ckptool, trainer; print(ckptool.__file__, trainer.__file__)").split()
    assert all(Path(file).is_relative_to(place) for file in found)
    assert ckpt("--version").split() == ["ckptool", ckptool.__version__]
    assert "import-hf" in ckpt("--help")
    ckpt("import-hf", "hf", "base")
    train = ["--seq-len", "8", "--global-batch-size", "2", "--steps", "1", "--device", "cpu", "--log-to", "none"]
    python("-m", "trainer", "--init-from", "base", "--data", "text.txt", *train)
    assert [entry["name"] for entry in json.loads(ckpt("ls", "--json"))["checkpoints"]] == ["base", "step-1"]
    ckpt("export", "step-1")
    assert AutoModelForCausalLM.from_pretrained(work / "ckpt" / "step-1-hf").config.model_type == "llama"


def test_the_lowest_versions_that_are_allowed_are_those_of_make_test_lowest() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    allowed = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join([*project["dependencies"], *extras]), re.MULTILINE))
    pins = (TOP / "tests" / "constraints-lowest.txt").read_text(encoding="utf-8")
    tried = dict(re.findall(r"^([\w-]+)==([\d.]+)$", pins, re.MULTILINE))
    assert [name for name, version in tried.items() if not f"{version}.".startswith(f"{allowed[name]}.")] == []
    assert {re.split(r"[^\w-]", need)[0] for need in project["dependencies"]} <= tried.keys()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ckptool.__version__
    assert citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
