"""MkDocs' hooks: generated reference pages, and files of the repository that pages link to, under `repository/`."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

from tools.docs_site import reference

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_OUTSIDE = "repository"
_IGNORED = ("http://", "https://", "mailto:")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages, and what is linked from the pages or from another file added here."""
    for name, render in reference.PAGES.items():
        files.append(File.generated(config, name, content=render()))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for path in _linked(_source(page.src_uri), page.content_string):
            name = _place(path)
            if name.startswith(_OUTSIDE) and (ROOT / path).is_file() and files.get_file_from_path(name) is None:
                content, inclusion = (ROOT / path).read_bytes(), InclusionLevel.NOT_IN_NAV
                added = File.generated(config, name, content=content, inclusion=inclusion)
                files.append(added)
                if name.endswith(".md"):
                    waiting.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where the files are on the site; a link to a folder becomes its name."""
    source, here = _source(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        if target.startswith(_IGNORED):
            return link[0]
        path = _resolved(source, target)
        if (ROOT / path).is_dir():
            return before[1:-2]
        return f"{before}{posixpath.relpath(_place(path), here or '.')}{after}"

    return _LINK.sub(replaced, markdown)


def _source(name: str) -> str:
    """Return where a page of the site is in the repository; a generated one is as if it were in docs/."""
    return name.removeprefix(f"{_OUTSIDE}/") if name.startswith(f"{_OUTSIDE}/") else f"docs/{name}"


def _place(path: str) -> str:
    """Return the name on the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_OUTSIDE}/{path}"


def _resolved(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _linked(source: str, markdown: str) -> Iterator[str]:
    for link in _LINK.finditer(markdown):
        if not link[2].startswith(_IGNORED):
            yield _resolved(source, link[2])
