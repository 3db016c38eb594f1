"""The figures on the pages are those of the stored results."""

import re
from pathlib import Path

import pytest

from benchmarks.figures import charts, pages


def test_every_page_shows_the_stored_results() -> None:
    assert pages.main("check") == 0


def test_a_figure_written_by_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    for name in pages.PAGES:
        text = (pages.ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("1.39", "1.93"), encoding="utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.main("check") == 1
    assert pages.main("write") == 0
    assert pages.main("check") == 0


def test_every_picture_of_the_page_is_there_and_charts_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = set(re.findall(r"\(pictures/(\w+\.svg)\)", pages.performance()))
    assert shown == {path.name for path in (pages.ROOT / "docs" / "pictures").iterdir() if path.name in shown}
    charts.draw_all(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn
    assert drawn <= shown


def test_a_ratio_that_misses_its_aim_is_recognised() -> None:
    assert charts.RatioRow("put", [], 1.2).misses(1.19)
    assert not charts.RatioRow("put", [], 1.2).misses(1.2)
    assert charts.RatioRow("CPU", [], 3.0, "lower").misses(3.1)
    assert not charts.RatioRow("CPU", [], 3.0, "lower").misses(3.0)
