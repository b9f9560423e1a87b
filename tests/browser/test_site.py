"""Every page of the site, narrow and wide, light and dark: no fault, no overflow, legible; the search finds pages."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.browser.conftest import SITE, Watched

pytestmark = pytest.mark.browser

LEGIBLE = ["color-contrast", "document-title", "html-has-lang", "image-alt", "link-name", "button-name", "duplicate-id"]
"""The rules of axe-core that pages have to pass."""

FOUND = {
    "clipped sum": "Start in five minutes",
    "GradProjection": "Quantities",
    "LSTM": "Operators, kernels and memory",
}
"""Words that a reader searches for, and a page among those found."""

PICTURES = os.environ.get("FXGRAD_PICTURES")
"""A folder that keeps a picture of each page, to be looked at."""


def pages() -> list[str]:
    """List the pages; of listings of source code, which one template makes, one stands for all."""
    found = [path.relative_to(SITE).as_posix() for path in sorted(SITE.rglob("*.html"))]
    listings = [page for page in found if page.startswith("_modules/")]
    return [page for page in found if page not in listings and not page.startswith("_static/")] + listings[-1:]


def overflow(page: Any) -> int:
    """Return how many pixels a page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return width


def brightness(page: Any) -> float:
    """Return the brightness of a page's ground, of 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    values = [float(part) for part in colour.strip("rgba()").split(",")[:3]]
    return sum(values) / 3


def illegible(page: Any) -> list[str]:
    """List what breaks a rule of axe-core."""
    from axe_playwright_python.sync_playwright import Axe

    context = {"exclude": [[".sphx-glr-thumbcontainer"]]}  # sphinx-gallery's links there have a picture and a tooltip
    found = Axe().run(page, context=context, options={"runOnly": {"type": "rule", "values": LEGIBLE}})
    return [
        f"{violation['id']}: {node['html'][:120]} {node['any'][0]['message'] if node['any'] else ''}"
        for violation in found.response["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.timeout(1200)  # some sixty pages, on a machine that may be slow
def test_every_page(watched: Watched, address: str, request: pytest.FixtureRequest) -> None:
    faults: list[str] = []
    dark = "dark" in request.node.callspec.id
    every = pages()
    assert len(every) > 30
    for name in every:
        watched.faults.clear()
        watched.page.goto(f"{address}/{name}", wait_until="load")
        faults += [f"{name}: {fault}" for fault in watched.faults]
        if overflow(watched.page) > 0:
            faults.append(f"{name}: {overflow(watched.page)} pixels wider than the window")
        if (brightness(watched.page) < 128) != dark:
            faults.append(f"{name}: its ground is not {'dark' if dark else 'light'}")
        if "wide" in request.node.callspec.id:  # colours do not depend on the width
            faults += [f"{name}: {fault}" for fault in illegible(watched.page)]
        if PICTURES:
            form = request.node.callspec.id
            watched.page.screenshot(path=f"{PICTURES}/{name.removesuffix('.html').replace('/', '-')}-{form}.png")
    assert not faults, "\n".join(faults)


def test_the_search_finds_pages(watched: Watched, address: str) -> None:
    for words, title in FOUND.items():
        watched.page.goto(f"{address}/search.html?q={words}")
        link = watched.page.locator("ul.search a", has_text=title).first
        link.wait_for(timeout=20_000)
        link.click()
        assert title in watched.page.locator("h1").first.inner_text()
    assert not watched.faults, watched.faults


def test_the_menu_leads_to_each_caption(watched: Watched, address: str) -> None:
    """On a narrow window the pages stand behind a button."""
    watched.page.goto(f"{address}/index.html")
    link = watched.page.locator(".sidebar-tree a", has_text="Design").first
    if watched.page.viewport_size["width"] < 600:
        assert not link.is_visible() or link.bounding_box()["x"] < 0
        watched.page.locator("label.nav-overlay-icon").first.click()
    link.click()
    watched.page.wait_for_url("**/design.html")
    assert not watched.faults
