"""The page as Chromium shows it. Skipped where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Page, browser, connect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

#: The page is asked to draw in 2 s; a machine that does other work besides takes longer.
MAX_DRAW_MILLISECONDS = 6000
DRAWN = "document.getElementById('drawn')?.textContent"
AXIS_LABELS = "Bokeh.documents.flatMap((d) => d.roots()).map((r) => r.below[0].axis_label)"
PLACE = """
(() => {
  const place = document.getElementById("shards-0");
  place.scrollIntoView();
  return place.getBoundingClientRect().toJSON();
})()
"""
#: What hovers over the charts, with all shadow roots opened.
HOVERING = """
(() => {
  const below = (e) => (e.shadowRoot ? all(e.shadowRoot) : []);
  const all = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...below(e)]);
  const shown = all(document).filter((e) => e.classList.contains("bk-tooltip-row-value"));
  const unsafe = all(document).filter((e) => e.tagName === "IMG" || e.hasAttribute("onerror"));
  return shown.length ? { text: shown.map((e) => e.textContent).join(" "), unsafe: unsafe.length } : null;
})()
"""


def test_a_page_of_100_000_chunks_draws_soon_offline_and_unharmed(big_page: str, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        drawn = await page.wait_for(DRAWN)
        assert drawn.startswith("9 charts drawn in ")
        assert int(drawn.split()[-2]) < MAX_DRAW_MILLISECONDS
        assert await page.value("document.title.startsWith('ckptool report: run')")
        assert page.requests() == [(tmp_path / "report.html").as_uri()]
        assert page.complaints() == []
        assert set(await page.value(AXIS_LABELS)) - {"", None} == {"step", "file", "layer"}
        await page.value("document.querySelector('input[value=consumed]').click()")
        assert await page.wait_for("document.documentElement.dataset.along") == "consumed"
        assert set(await page.value(AXIS_LABELS)) - {"", None} == {"data position", "file", "layer"}
        box = await page.value(PLACE)
        x, y = box["x"] + box["width"] * 0.5, box["y"] + 305
        for shift in (0, 3):
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)
        hovering = await page.wait_for(HOVERING)
        assert "<script>" in hovering["text"] and hovering["unsafe"] == 0
        assert not await page.value("document.title === 'owned'")
        assert page.complaints() == []

    file = tmp_path / "report.html"
    file.write_text(big_page, encoding="utf-8")
    in_browser(file, look)


def in_browser(file: Path, look: Callable[[Page], Awaitable[None]]) -> None:
    async def visit(address: str) -> None:
        page = await connect(address)
        await page.open(file)
        await look(page)

    with browser() as address:
        asyncio.run(visit(address))
