"""Hooks of the site: pages link to files of the repository outside docs/, which come along under their own paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = Path(__file__).parents[1]
DOCS = TOP / "docs"
#: A file outside docs/ that is a page of its own.
_PAGES = {"CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\]\((\.\./[^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page of docs/ links to."""
    for page in sorted(DOCS.rglob("*.md")):
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            name = _outside(page.parent, link)
            if name is not None and files.get_file_from_path(name) is None:
                files.append(_file(name, config))
    for name, uri in _PAGES.items():
        if files.get_file_from_path(uri) is None:
            files.append(_file(name, config))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to such files lead to where they are in the site."""
    folder = (DOCS / page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        name = _outside(folder, match[1])
        if name is None:
            return match[0]
        return "](" + os.path.relpath(DOCS / _PAGES.get(name, name), folder)

    return _LINK.sub(moved, markdown)


def _outside(folder: Path, link: str) -> str | None:
    """The path in the repository of what a link leads to, or None when that is in docs/."""
    target = Path(os.path.normpath(folder / link))
    return None if target.is_relative_to(DOCS) else target.relative_to(TOP).as_posix()


def _file(name: str, config: Any) -> File:
    return File.generated(config, _PAGES.get(name, name), abs_src_path=str(TOP / name))
