"""Report the lengths of the sentences in README.md, CONTRIBUTING.md and docs/, outside of tables and code.

    python tools/sentences.py                # one line a page, then each sentence of more than 25 words
    python tools/sentences.py docs/design.md

A sentence ends at a full stop, a question mark or an exclamation mark. The end of a paragraph or of a list item ends
one, too. A heading is no sentence. A span of code or of mathematics counts as one word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONG, TOO_LONG = 25, 40  # words

FENCE = re.compile(r"^\s*(```|~~~)")
ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")
HEADING = re.compile(r"^\s{0,3}#{1,6}\s")
INDENTED = re.compile(r"^( {4,}|\t)\S")
SPAN = re.compile(r"(`+)(.+?)\1", re.DOTALL)  # code
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.?!])[*_)\"]*\s+")
SHORT = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Sentence:
    """One sentence and the line on which it begins."""

    page: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        return sum(any(map(str.isalnum, word)) for word in self.text.split())

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.words} words: {self.text}"


def pages() -> list[Path]:
    """List the pages whose sentences are measured."""
    fixed = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [page for page in [*fixed, *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]


def find_sentences(page: Path) -> list[Sentence]:
    """Split the prose of one page into sentences."""
    shown = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    sentences = []
    for first, paragraph in _paragraphs(page.read_text()):
        text = LINK.sub(r"\1", SPAN.sub(_one_word, paragraph))
        text = SHORT.sub(lambda found: found[0].replace(".", "\N{ONE DOT LEADER}"), text)
        begin = 0
        for end in [*(found.end() for found in END.finditer(text)), len(text)]:
            sentence = Sentence(shown, first + text[:begin].count("\n"), " ".join(text[begin:end].split()))
            if sentence.words:
                sentences.append(sentence)
            begin = end
    return sentences


def _one_word(span: re.Match[str]) -> str:
    """Replace a span of code by one word that ends no sentence."""
    return "`" + re.sub(r"\W", "_", span[2]) + "_`"


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and list item with the number of its first line; leave out code, tables and headings."""
    text = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    fenced = in_list = False
    lines: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if FENCE.match(line):
            fenced, line = not fenced, ""
        elif fenced or HEADING.match(line) or line.lstrip().startswith("|") or _is_code(line, lines, in_list):
            line = ""
        if (not line.strip() or ITEM.match(line)) and lines:
            yield first, "\n".join(lines)
            lines = []
        if line.strip():
            in_list = bool(ITEM.match(line)) or (in_list and (bool(lines) or line[0].isspace()))
            first = first if lines else number
            lines.append(ITEM.sub("", line))


def _is_code(line: str, paragraph: list[str], in_list: bool) -> bool:
    """Say whether an indented line begins a block of code."""
    return not paragraph and not in_list and bool(INDENTED.match(line))


def mean(sentences: list[Sentence]) -> float:
    """Return the mean length in words."""
    return sum(sentence.words for sentence in sentences) / max(len(sentences), 1)


def summary(name: str, sentences: list[Sentence]) -> str:
    """Return one line of the report."""
    longer = [sum(s.words > limit for s in sentences) for limit in (LONG, TOO_LONG)]
    return f"{name:24}{len(sentences):6}{mean(sentences):8.1f}{longer[0]:8}{longer[1]:8}"


def main(arguments: list[str]) -> int:
    """Print the report; return 1 if a sentence has more than TOO_LONG words."""
    chosen = [Path(name).resolve() for name in arguments] or pages()
    by_page = {page: find_sentences(page) for page in chosen}
    everything = [sentence for sentences in by_page.values() for sentence in sentences]
    print(f"{'page':24}{'count':>6}{'mean':>8}{f'> {LONG}':>8}{f'> {TOO_LONG}':>8}")
    for page, sentences in by_page.items():
        print(summary(page.name, sentences))
    print(summary("all", everything))
    for sentence in everything:
        if sentence.words > LONG:
            print(sentence)
    return int(any(sentence.words > TOO_LONG for sentence in everything))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
