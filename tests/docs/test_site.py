"""The documentation as a site: every page is reachable, and it builds without a warning where MkDocs is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptool
from tests.docs.pages import TOP

DOCS = TOP / "docs"
#: The site's page of a file outside docs/.
OUTSIDE = {"changelog.md"}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions, without them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def nav_pages(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from nav_pages(child)


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    config = yaml.load((TOP / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    assert sorted(nav_pages(config["nav"])) == sorted(pages | OUTSIDE)
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", index))
    assert pages - {"index.md"} <= linked


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs ckptool[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=TOP,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_asks_no_other_host(site: Path) -> None:
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^\s>]*")
    found = {match for page in site.rglob("*.html") for match in fetched.findall(page.read_text(encoding="utf-8"))}
    assert found == set()


def test_every_public_name_is_described_from_its_docstring(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    headings = set(re.findall(r'<h3 id="ckptool\.(\w+)"', page))
    assert headings == set(ckptool.__all__) - {"__version__"}
    assert "Raises NotFoundError" in page
