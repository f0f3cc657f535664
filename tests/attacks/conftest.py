"""Real checkpoints and model folders to turn hostile, and a watch over what may not be touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.cli.main import run
from tests.tiny_models import llama, save_folder


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hub` is a Hugging Face folder in two shards, `ckpt/tiny` its import."""
    top = tmp_path_factory.mktemp("pristine")
    save_folder(llama(), top / "hub", max_shard_size="50KB")
    assert run(["import-hf", str(top / "hub"), "tiny", "--root", str(top / "ckpt"), "--quiet"]) == 0
    return top


@pytest.fixture
def victim(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to attack, beside a secret that must be neither read into anything nor changed."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("TOP SECRET")
    yield Path(shutil.copytree(pristine, tmp_path / "victim"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "victim"]
    assert [(path.name, path.read_text()) for path in secret.iterdir()] == [("key", "TOP SECRET")]
    leaks = [
        path
        for path in (tmp_path / "victim").rglob("*")
        if path.is_file() and not path.is_symlink() and b"TOP SECRET" in path.read_bytes()
    ]
    assert leaks == []
