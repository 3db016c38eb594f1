"""The project's pages, cut into what can be checked: fenced blocks, inline code, links, headings, tables."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_ANCHOR = re.compile(r"<a id=\"([^\"]+)\">")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path
    text: str

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """Contents of the fenced blocks of a language."""
        return [body for found, body in _FENCE.findall(self.text) if found == language]

    def inline(self) -> list[str]:
        """Contents of `code` in the running text."""
        return _INLINE.findall(self.prose)

    def links(self) -> list[str]:
        """Targets of links and pictures."""
        return _LINK.findall(_INLINE.sub("", self.prose))

    def anchors(self) -> set[str]:
        """Return the anchors of a page: headings as GitHub names them, and anchors set by hand."""
        headings = (_INLINE.sub(r"\1", heading) for heading in _HEADING.findall(self.prose))
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        return slugs | set(_ANCHOR.findall(self.prose))

    def section(self, heading: str) -> str:
        """Return the text under a heading, up to the next of any level."""
        parts = re.split(r"^#+ +(.+)$", self.prose, flags=re.MULTILINE)
        return parts[parts.index(heading) + 1]


def first_column(text: str) -> list[str]:
    """Inline code in the first column of the tables in `text`."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return [code for cell in cells for code in _INLINE.findall(cell)]


def shell_lines(block: str) -> Iterator[str]:
    """Logical lines of a shell block, continued ones joined, each with its part of a loop cut away."""
    for line in block.replace("\\\n", " ").splitlines():
        yield re.sub(r"\s+&$", "", line.strip())


@pytest.fixture(scope="session")
def pages() -> list[Page]:
    docs = sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    paths = [ROOT / "README.md", *docs, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    return [Page(path, path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture(scope="session")
def page(pages: list[Page]) -> Callable[[str], Page]:
    """A page by the name of its file."""
    return {page.path.name: page for page in pages}.__getitem__


@pytest.fixture(scope="session")
def command_lines(pages: list[Page]) -> list[tuple[str, str]]:
    """(page, line) of every line in a shell block."""
    return [(str(page), line) for page in pages for block in page.blocks("bash") for line in shell_lines(block)]


@pytest.fixture(scope="session")
def documented() -> Callable[[str], list[str]]:
    return first_column
