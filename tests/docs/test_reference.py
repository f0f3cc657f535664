from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import PAGES, TOP, load_script


def test_the_command_line_page_is_current() -> None:
    generator = load_script("docs/reference/generate_cli.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run `make docs`"


def test_the_table_of_model_families_is_current() -> None:
    generator = load_script("docs/reference/generate_families.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run `make docs`"


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(TOP)}: {target}" for page in PAGES for target in links(page) if not exists(page, target)
    ]
    assert broken == []


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]


def exists(page: Path, target: str) -> bool:
    """The file is there, and so is the heading after `#`, by GitHub's rule for anchors."""
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        return False
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
