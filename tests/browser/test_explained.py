"""The page of `fxgrad.explain`: no fault, legible, and its graph of 1,000 values can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Watched
from tests.browser.test_site import brightness, illegible, overflow

pytestmark = pytest.mark.browser

SECONDS = 6.0
"""The longest that opening every group of the graph may take; the machine may be busy."""

REDRAWN = """() => {
  const edges = () => document.querySelectorAll('.graph svg path').length;
  const before = performance.now(), closed = edges();
  document.querySelectorAll('.graph details').forEach(group => group.open = true);
  return new Promise(done => {
    const look = () => edges() > closed ? done(performance.now() - before) : requestAnimationFrame(look);
    look();
  });
}"""
"""Opens every group, and waits until their own edges are drawn; returns the milliseconds that took."""


def edges(page: Any) -> int:
    return int(page.locator(".graph svg path").count())


def test_the_page(watched: Watched, explained: Path, request: pytest.FixtureRequest) -> None:
    page = watched.page
    page.goto(explained.as_uri(), wait_until="load")
    assert overflow(page) <= 0
    assert (brightness(page) < 128) == ("dark" in request.node.callspec.id)
    assert not illegible(page)
    assert not watched.faults


def test_a_large_graph_can_be_used(watched: Watched, explained: Path) -> None:
    page = watched.page
    page.goto(explained.as_uri(), wait_until="load")
    rows = page.locator(".graph .row").count()
    assert rows > 1000
    closed = edges(page)
    assert page.evaluate(REDRAWN) < 1000 * SECONDS
    assert edges(page) > closed
    page.locator('button[data-open=""]').click()
    page.wait_for_function(f"document.querySelectorAll('.graph svg path').length === {closed}")
    assert not watched.faults


def test_a_parameter_leads_to_its_use(watched: Watched, explained: Path) -> None:
    """A link of the table opens the groups around a value and scrolls to it."""
    page = watched.page
    page.goto(explained.as_uri(), wait_until="load")
    link = page.locator(".parameters a[href^='#']").last
    target = page.locator(link.get_attribute("href").replace("#", "[id='") + "']")
    link.click()
    target.wait_for(state="visible")
    box, high = target.bounding_box(), page.viewport_size["height"]
    assert 0 <= box["y"] <= high
    assert not watched.faults
