"""The documentation site has no dead link, loads nothing from other hosts, and names what the code declares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.api.openapi import describe
from moonpool.cli import app
from moonpool.commands.lazy import every_command
from moonpool.config import all_settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"plan"}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert (site / "search" / "search_index.json").exists()


def test_links_into_the_repository_lead_to_the_files(site: Path) -> None:
    assert (site / "repository" / "CHANGELOG.html").exists()
    assert (site / "repository" / "engine" / "families.py").read_bytes() == (
        ROOT / "engine" / "families.py"
    ).read_bytes()


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img|iframe)[^>]* src=\"https?:|<link[^>]* href=\"https?:", text) == [], page


def test_the_reference_names_everything_that_the_code_declares(site: Path) -> None:
    def text(name: str) -> str:
        return (site / "reference" / name).read_text(encoding="utf-8")

    assert [
        name for name in every_command(app, with_hidden=False) if f"moonpool {name}<" not in text("commands.html")
    ] == []
    configuration = text("configuration.html")
    assert [each.name for each in all_settings().values() if f"<code>{each.variable}</code>" not in configuration] == []
    assert [path for path in describe(asks_for_key=True)["paths"] if f" {path}<" not in text("http.html")] == []
    assert "<code>image.repository</code>" in text("helm.html")
