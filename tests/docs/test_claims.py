"""What pages say of speed and of exit codes, against the scripts and the classes that they speak of."""

from __future__ import annotations

import re

from ckptool import errors
from tests.docs.pages import PAGES, TOP

SCRIPT = re.compile(r"benchmarks/[\w/]+\.py")


def test_every_benchmark_that_a_page_names_is_there() -> None:
    named = {name for page in PAGES for name in SCRIPT.findall(page.read_text(encoding="utf-8"))}
    assert named and [name for name in sorted(named) if not (TOP / name).is_file()] == []


def test_every_table_of_measurements_stands_in_a_section_that_names_its_script_or_its_rows() -> None:
    page = (TOP / "docs" / "performance.md").read_text(encoding="utf-8")
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    del sections["Tried"]  # what came to nothing
    without = [title for title, text in sections.items() if "\n|---" in text and "benchmarks/" not in text]
    assert without == []


def test_the_page_of_exit_codes_has_those_of_the_errors() -> None:
    page = (TOP / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]*)\|", page, re.MULTILINE)
    documented = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    defined = {kind.__name__: kind.exit_code for kind in classes if issubclass(kind, errors.CkptoolError)}
    assert documented == defined
