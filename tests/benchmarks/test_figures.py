"""The figures on the pages are those of the stored results."""

from pathlib import Path

import pytest

from benchmarks import figures


def test_every_page_shows_the_stored_results() -> None:
    assert figures.main("check") == 0


def test_a_figure_written_by_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    for name in figures.PAGES:
        text = (figures.ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("1.39", "1.93"), encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.main("check") == 1
    assert figures.main("write") == 0
    assert figures.main("check") == 0
