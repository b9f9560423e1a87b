"""A headless Chromium, and a server of the built site: `make browser`, behind `make docs`."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad

SITE = Path(__file__).parents[2] / "docs" / "_build" / "html"
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
WIDTHS = {"narrow": (390, 800), "wide": (1280, 900)}
SCHEMES = ("light", "dark")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server without a line on stderr for each request."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Serve the built site on this machine."""
    assert (SITE / "index.html").is_file(), f"no site in {SITE}: run `make docs` first"
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright import sync_api  # `make browser` installs it

    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path is not None, "no Chromium on PATH: apt-get install chromium"
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Watched:
    """One page of a browser, with every fault that it reports."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # what a click on a link leaves unread
            self.faults.append(f"{request.failure}: {request.url}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids="-".join)
def watched(request: pytest.FixtureRequest, browser: Any) -> Iterator[Watched]:
    """A page of each width, in each colour scheme."""
    width, scheme = request.param
    wide, high = WIDTHS[width]
    context = browser.new_context(viewport={"width": wide, "height": high}, color_scheme=scheme)
    yield Watched(context.new_page())
    context.close()


class Block(nn.Module):
    """Some ten ops, which are one group of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)).exp().sin())


class Deep(nn.Module):
    """A model whose rewritten graph has more than 1,000 values."""

    def __init__(self, depth: int = 170) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="session")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `fxgrad.explain` for a graph of more than 1,000 values."""
    explanation = fxgrad.explain(Deep(), torch.randn(3, 4))
    assert len(explanation.values) > 1000
    path = tmp_path_factory.mktemp("explained") / "page.html"
    explanation.to_html(path)
    return path
