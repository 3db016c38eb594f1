"""The console's files as HTTP answers. What is served is what lies in `page/` when the process starts, nothing else."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

__all__ = ["SECURITY_HEADERS", "Page", "Pages"]

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and requests of this origin alone; nothing inline, no frame, no form, and no text becomes markup.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Page:
    """One file. A browser keeps it, and asks each time whether it has changed."""

    body: bytes
    headers: Mapping[str, str]

    def is_known(self, if_none_match: str) -> bool:
        """Whether the browser has this very content, as its header says."""
        named = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return self.headers["etag"] in named or "*" in named


class Pages:
    """All files by name; "" is the page itself."""

    def __init__(self) -> None:
        found = {each.name: each.read_bytes() for each in (files(__package__) / "page").iterdir() if each.is_file()}
        self._pages = {name: _page(name, body) for name, body in found.items() if _suffix(name) in _TYPES}
        self._pages[""] = self._pages["index.html"]

    def find(self, name: str) -> Page | None:
        """The file of that name."""
        return self._pages.get(name)

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return sorted(self._pages)


def _page(name: str, body: bytes) -> Page:
    headers = {
        "content-type": _TYPES[_suffix(name)],
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return Page(body, {**headers, **SECURITY_HEADERS})


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
