import shutil
from pathlib import Path

import pytest

from tests.trainer import tiny


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A root with a base checkpoint and text, never trained in."""
    root = tmp_path_factory.mktemp("pristine")
    tiny.make_base(root / "base")
    tiny.make_data(root / "text")
    return root


@pytest.fixture
def root(pristine, tmp_path) -> Path:
    """A copy of it to train in."""
    return Path(shutil.copytree(pristine, tmp_path / "root"))
