from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from ckptool.errors import UnsupportedError
from ckptool.ops.report.figures import label
from ckptool.ops.report.page import check_libraries
from tests.ops.report.big import EVIL

MAX_PAGE_BYTES = 5_000_000


class Parsed(HTMLParser):
    """What a browser would see: elements with their attributes, the texts of scripts, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def parsed(big_page: str) -> Parsed:
    return Parsed(big_page)


def test_a_page_of_100_000_chunks_and_steps_is_small(big_page: str) -> None:
    assert len(big_page.encode()) < MAX_PAGE_BYTES


def test_hostile_names_stay_text(parsed: Parsed) -> None:
    assert len(parsed.scripts) == 3
    assert parsed.all("img") == []
    assert "<img src=x onerror=document.title='owned'>" in parsed.text
    assert "\u202e" not in parsed.text
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)


def test_nothing_is_asked_of_another_host(parsed: Parsed) -> None:
    outside = [
        (tag, value)
        for tag, attributes in parsed.elements
        for name, value in attributes.items()
        if name in ("src", "href") and not (value or "").startswith("#")
    ]
    assert outside == []


def test_the_policy_allows_the_two_scripts_of_the_page_and_nothing_else(parsed: Parsed) -> None:
    policy = next(a["content"] for a in parsed.all("meta") if a.get("http-equiv") == "Content-Security-Policy") or ""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in parsed.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_every_chart_has_its_place_a_description_and_a_table_in_its_section(big_page: str, parsed: Parsed) -> None:
    items = json.loads(parsed.scripts[0])
    places = {a["id"]: a for a in parsed.all("div") if a.get("class") == "chart"}
    assert list(places) == list(items) and len(items) == 9
    assert all(place["role"] == "img" and place["aria-label"] for place in places.values())
    for section in re.findall(r"<section .*?</section>", big_page, re.DOTALL):
        assert 'role="img"' not in section or "<table>" in section


def test_tables_say_how_many_rows_they_leave_out(parsed: Parsed) -> None:
    assert "Parts: 1000 of 100000" in parsed.text
    assert "Steps: 500 of 100000" in parsed.text


def test_tables_can_be_read_out_and_scrolled_with_the_keyboard(parsed: Parsed) -> None:
    assert all(header["scope"] == "col" for header in parsed.all("th"))
    regions = [a for a in parsed.all("div") if a.get("class") == "scroll"]
    assert regions and all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    assert parsed.all("html") == [{"lang": "en"}]


def test_labels_are_short_and_no_formulas() -> None:
    assert len(label("x" * 500, 20)) <= 21
    assert "$$" not in label(EVIL, 200) and "\\(" not in label("\\(x\\)")
    assert label("model.layers.0") == "model.layers.0"


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "squarify", None)
    with pytest.raises(UnsupportedError, match="squarify is needed") as caught:
        check_libraries()
    assert caught.value.hint == "pip install 'ckptool[report]'"
