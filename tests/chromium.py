"""A real browser for tests: Debian's Chromium, driven by Playwright, and axe-core's judgement of a page.

Where there is no Chromium tests skip, but with REQUIRE_CHROMIUM=1, as in CI, they fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import axe_playwright_python
import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

__all__ = ["PHONE", "Visit", "chromium", "look_at", "open_visit"]

PHONE = {"width": 360, "height": 780}
DESKTOP = {"width": 1280, "height": 900}
PATIENCE_MS = 60_000  # machines are slow and shared
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
_GRAVE = ("serious", "critical")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """One browser; skips, or fails where it must be there."""
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        text = f"no browser is installed: none of {', '.join(_PROGRAMS)} is on the PATH (apt-get install chromium)"
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail(f"REQUIRE_CHROMIUM is set, and {text}")
        pytest.skip(text)
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root, in containers with little shared memory
        browser = await playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Visit:
    """A page that was opened, and what was wrong with it."""

    page: Page
    origin: str  # "" for a file
    errors: list[str] = field(default_factory=list)  # of the console, and uncaught
    elsewhere: list[str] = field(default_factory=list)  # addresses that were asked beside the page's own origin
    expects: tuple[str, ...] = ()  # parts of errors that belong to the test

    def watch(self) -> None:
        """From now on."""
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def check(self) -> None:
        """Nothing is wrong."""
        assert not self.errors
        assert not self.elsewhere

    async def axe(self) -> None:
        """axe-core finds nothing serious."""
        await self.page.evaluate(_AXE.read_text(encoding="utf-8"))
        found: Any = await self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        grave = [
            (each["id"], each["help"], [node["html"][:300] for node in each["nodes"]][:5])
            for each in found["violations"]
            if each["impact"] in _GRAVE
        ]
        assert not grave, grave
        assert found["testEngine"]["version"] >= "4.10"
        assert found["passes"], "axe looked at nothing"

    async def fits(self) -> None:
        """Nothing sticks out to the right of the window."""
        wide, window = await self.page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= window

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.expects):
            self.errors.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.origin + "/", "data:", "blob:")):
            self.elsewhere.append(request.url)


@asynccontextmanager
async def open_visit(
    browser: Browser,
    url: str,
    *,
    scheme: Literal["light", "dark"] = "light",
    window: Any = None,
    expects: tuple[str, ...] = (),
) -> AsyncIterator[Visit]:
    """Open `url` in a browser profile of its own; at the end nothing may have been wrong."""
    context = await browser.new_context(
        color_scheme=scheme, viewport=window or DESKTOP, reduced_motion="reduce", locale="en-GB", timezone_id="UTC"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    origin = "" if url.startswith("file:") else "/".join(url.split("/")[:3])
    visit = Visit(page, origin or url.rpartition("/")[0], expects=expects)
    visit.watch()
    try:
        await page.goto(url)
        yield visit
        visit.check()
    finally:
        await context.close()


def look_at(page: Path) -> None:
    """Open a page that lies in a file, in light and dark, on a phone, too: nothing is wrong with it."""

    address = page.resolve().as_uri()

    async def look() -> None:
        async with chromium() as browser:
            for scheme, window in (("light", None), ("dark", PHONE)):
                async with open_visit(browser, address, scheme=scheme, window=window) as visit:  # type: ignore[arg-type]
                    await visit.axe()
                    await visit.fits()

    asyncio.run(look())
