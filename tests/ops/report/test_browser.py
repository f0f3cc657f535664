"""The page as Chromium shows it. Skipped where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, Page, browser, connect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

#: From an empty page to all charts, in processor seconds, so that a busy machine doesn't fail it.
MAX_DRAW_SECONDS = 2.0
MAX_MOVES = 300
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
        assert 0 < await page.processor_seconds() < MAX_DRAW_SECONDS
        assert await page.value("document.title.startsWith('ckptool report: run')")
        assert page.requests() == [(tmp_path / "report.html").as_uri()]
        assert page.complaints() == []
        assert set(await page.value(AXIS_LABELS)) - {"", None} == {"step", "file", "layer"}
        await page.value("document.querySelector('input[value=consumed]').click()")
        assert await page.wait_for("document.documentElement.dataset.along") == "consumed"
        assert set(await page.value(AXIS_LABELS)) - {"", None} == {"data position", "file", "layer"}
        hovering = await hover(page)
        assert "<script>" in hovering["text"] and hovering["unsafe"] == 0
        assert not await page.value("document.title === 'owned'")
        assert page.complaints() == []

    file = tmp_path / "report.html"
    file.write_text(big_page, encoding="utf-8")
    in_browser(file, look)


async def hover(page: Page) -> dict[str, Any]:
    """Move over the shard map, again and again since a chart that is still being drawn doesn't notice."""
    for number in range(MAX_MOVES):
        box = await page.value(PLACE)
        x, y = box["x"] + box["width"] * 0.5 + 3 * (number % 2), box["y"] + 305
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if hovering := await page.value(HOVERING):
            return hovering
        await asyncio.sleep(0.1)
    raise AssertionError("nothing is shown of what the mouse is over")


def in_browser(file: Path, look: Callable[[Page], Awaitable[None]]) -> None:
    async def visit(address: str) -> None:
        page = await connect(address)
        await page.open(file)
        await look(page)

    with browser() as address:
        asyncio.run(visit(address))


COLORS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
FOCUSED = "document.activeElement.className || document.activeElement.tagName"


def test_the_page_follows_the_light_or_dark_setting_and_the_keyboard(small_page: str, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.wait_for(DRAWN)
        colors = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=features)
            colors.append(await page.value(COLORS))
        assert colors[0][0] != colors[1][0] and colors[0][1] != colors[1][1]
        reached = set()
        for _ in range(40):
            for kind in ("keyDown", "keyUp"):
                await page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            reached.add(await page.value(FOCUSED))
        assert {"skip", "A", "INPUT", "SUMMARY"} <= reached

    file = tmp_path / "report.html"
    file.write_text(small_page, encoding="utf-8")
    in_browser(file, look)
