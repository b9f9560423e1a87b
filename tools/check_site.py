"""Check the built site: each link inside of it leads to a page and a place on it, and no page loads from elsewhere.

python tools/check_site.py [FOLDER]   # docs/_build/html by default; exits with 1 and lists what is wrong
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parent.parent / "docs" / "_build" / "html"
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}  # with the page itself
RELATIONS = {"canonical", "next", "prev", "search", "index"}  # of links that a browser does not load


class Page(HTMLParser):
    """The places of one page, its links, and what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.places: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values and values.get("rel") not in RELATIONS:
            self.loaded.append(values[LOADED[tag]])


def is_elsewhere(address: str) -> bool:
    """Say whether an address leaves the site."""
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def find_faults(site: Path) -> list[str]:
    """List the links of a site that lead nowhere, and what its pages load from elsewhere or in vain."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    faults = [] if pages else [f"{site} holds no page"]
    for page in pages.values():
        name = page.path.relative_to(site)
        for address in page.loaded:
            if is_elsewhere(address) and not address.startswith("data:"):
                faults.append(f"{name}: loads {address}")
        inside = [address for address in [*page.links, *page.loaded] if not is_elsewhere(address)]
        for address in dict.fromkeys(inside):
            target, place = urlsplit(address).path, unquote(urlsplit(address).fragment)
            file = (page.path.parent / unquote(target)).resolve() if target else page.path.resolve()
            if not file.is_file():
                faults.append(f"{name}: no file for {address}")
            elif file in pages and place not in pages[file].places:
                faults.append(f"{name}: no place for {address}")
    return faults


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there are any."""
    faults = find_faults(Path(arguments[0]) if arguments else SITE)
    print("\n".join(faults) or "every link of the site leads somewhere")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
