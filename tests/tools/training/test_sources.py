"""Getting at the packages and their text."""

from pathlib import Path

import pytest

from tools.training.errors import SourceMismatch
from tools.training.sources import SOURCES, fetch
from tools.training.texts import read_kjv, read_wordnet


def literal_lzw(text: bytes) -> bytes:
    """A Unix-compress body of 9-bit literal codes only, least significant bit first."""
    bits = sum(byte << (9 * index) for index, byte in enumerate(text))
    return bits.to_bytes((9 * len(text) + 7) // 8, "little")


def test_a_package_with_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deb").mkdir()
    (tmp_path / "deb" / "jargon-text_4.4.7-4.1_all.deb").write_bytes(b"not the recorded package")
    source = next(source for source in SOURCES if source.name == "jargon")
    with pytest.raises(SourceMismatch, match="expected 17d05997"):
        fetch(source, tmp_path)


def test_shares_of_the_sources_sum_to_one() -> None:
    assert sum(source.share for source in SOURCES) == pytest.approx(1.0)


def test_kjv_windows_are_joined_and_split_into_chapters(tmp_path: Path) -> None:
    windows = [literal_lzw(b"Title line.\nGe1:1 In the begin"), literal_lzw(b"ning.\nGe1:2 And.\nGe2:1 Thus.\n")]
    start = 0x5C + 8
    offsets = [start, start + len(windows[0])]
    header = b"\0" * 0x58 + (2).to_bytes(4, "big") + b"".join(offset.to_bytes(4, "big") for offset in offsets)
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/bible.data").write_bytes(header + b"".join(windows))
    assert list(read_kjv(tmp_path)) == ["Ge1:1 In the beginning.\nGe1:2 And.", "Ge2:1 Thus."]


def test_a_synset_becomes_its_lemmas_and_gloss(tmp_path: Path) -> None:
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{part}").write_text("  1 licence line\n")
    row = "00039211 04 n 02 inter_play 0 contact(a) 2 001 @ 00039021 n 0000 | reciprocal action and reaction  \n"
    (folder / "data.noun").write_text("  1 licence line\n" + row)
    assert list(read_wordnet(tmp_path)) == ["inter play, contact: reciprocal action and reaction"]
