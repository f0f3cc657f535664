from __future__ import annotations

import pytest

from ckptool.ops.report.page import render
from tests.ops.report.big import big_contents


@pytest.fixture(scope="session")
def big_page() -> str:
    """A page about 100,000 chunks and 100,000 steps."""
    return render(big_contents())


@pytest.fixture(scope="session")
def small_page() -> str:
    """A page about a few chunks and steps."""
    return render(big_contents(num_layers=2, num_ranks=2, num_steps=20))
