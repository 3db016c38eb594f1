"""Extraction of plain-text documents from the unpacked packages, with one function per source."""

import gzip
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

CONCRETE = ("05", "06", "13", "17", "20")
"""WordNet's numbers of the categories animal, artifact, food, object and plant."""
LEAST_DEFINITION, LONGEST_DEFINITION = 16, 90
DEFINITIONS = 240

_PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-", "–": "-", "…": "...", "·": ".", " ": " "})


def documents(name: str, folder: Path) -> Iterator[str]:
    """Yield the documents of one source in file order; ``name`` is the source's short name."""
    yield from _READERS[name](folder)


def read_kjv(folder: Path) -> Iterator[str]:
    """Yield one document per chapter, with one verse per line (``Ge1:1 In the beginning ...``).

    ``bible.data`` consists of 68 windows of 64 KiB, each a Unix ``compress`` stream (LZW, 16 bits) without its
    three-byte header; the big-endian window offsets start at byte 0x5c.
    """
    data = (folder / "usr/lib/bible.data").read_bytes()
    count = int.from_bytes(data[0x58:0x5C], "big")
    offsets = [*struct.unpack(f">{count}I", data[0x5C : 0x5C + 4 * count]), len(data)]
    text = b"".join(_expand(data[start:stop]) for start, stop in pairwise(offsets))
    chapter, verses = "", list[str]()
    for line in text.decode("ascii").splitlines()[1:]:
        reference = line.split(":", 1)[0]
        if reference != chapter and verses:
            yield "\n".join(verses)
            verses = []
        chapter = reference
        verses.append(line)
    yield "\n".join(verses)


def _expand(window: bytes) -> bytes:
    header = b"\x1f\x9d\x90"
    return subprocess.run(["gzip", "-dc"], input=header + window, capture_output=True, timeout=60, check=True).stdout


def read_jargon(folder: Path) -> Iterator[str]:
    """Yield one document per entry, with unwrapped paragraphs."""
    text = gzip.decompress((folder / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode("utf-8")
    text = text.translate(_PLAIN)
    start = text.index("\n   :")
    for entry in re.split(r"\n(?=   :\S)", text[start:]):
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", entry)]
        document = "\n".join(part for part in paragraphs if part and not set(part) <= set("-_=═ "))
        if len(document) > 60:
            yield document


def read_wordnet(folder: Path) -> Iterator[str]:
    """Yield documents of sixteen synsets, one per line as ``lemma, lemma: gloss``."""
    lines = list[str]()
    for part in ("noun", "verb", "adj", "adv"):
        for row in _rows(folder / f"usr/share/wordnet/data.{part}"):
            fields, gloss = row.split(" | ", 1)
            words = fields.split(" ")
            lemmas = [words[4 + 2 * index].split("(")[0].replace("_", " ") for index in range(int(words[3], 16))]
            lines.append(f"{', '.join(lemmas)}: {gloss.strip()}")
    for start in range(0, len(lines), 16):
        yield "\n".join(lines[start : start + 16])


def read_definitions(folder: Path) -> list[tuple[str, str]]:
    """Return nouns for concrete things with their definitions, the most frequent first.

    The nouns are those that occur most often in WordNet's tagged texts, in their first sense; the definition is the
    gloss up to the first semicolon, without what stands in brackets. Only glosses that begin with an article or *any*
    are used.
    """
    root = folder / "usr/share/wordnet"
    senses, glosses = dict[str, str](), dict[str, str]()
    for row in _rows(root / "index.noun"):
        entry = row.split()
        senses[entry[0]] = entry[-int(entry[2])]
    for row in _rows(root / "data.noun"):
        fields, gloss = row.split(" | ", 1)
        offset, category = fields.split(" ", 2)[:2]
        if category in CONCRETE and " @i " not in fields:
            glosses[offset] = re.sub(r" ?\([^)]*\)", "", gloss.split(";")[0]).strip()
    counted = list[tuple[int, str]]()
    for counts in (root / "cntlist.rev").read_text("utf-8").splitlines():
        key, number, count = counts.split(" ")
        lemma, sense = key.split("%")
        if sense[0] == "1" and number == "1" and len(lemma) > 2 and lemma.isalpha() and lemma in senses:
            counted.append((-int(count), lemma))
    found = [(lemma, glosses.get(senses[lemma], "")) for _, lemma in sorted(counted)]
    return [
        (lemma, text)
        for lemma, text in found
        if LEAST_DEFINITION <= len(text) <= LONGEST_DEFINITION
        and text.isascii()
        and text.startswith(("a ", "an ", "the ", "any "))
    ][:DEFINITIONS]


def _rows(path: Path) -> Iterator[str]:
    return (row for row in path.read_text("utf-8").splitlines() if not row.startswith("  "))


def read_python(folder: Path) -> Iterator[str]:
    """Yield one document per page of the tutorial, reference, how-to, FAQ and library sources (reStructuredText)."""
    root = folder / "usr/share/doc/python3.11/html/_sources"
    for part in ("tutorial", "reference", "howto", "faq", "library"):
        for path in sorted((root / part).glob("*.rst.txt")):
            text = path.read_text("utf-8").translate(_PLAIN)
            yield re.sub(r"\n{3,}", "\n\n", re.sub(r"([=\-*~^#\"'])\1{3,}", r"\1\1\1", text)).strip()


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "kjv": read_kjv,
    "jargon": read_jargon,
    "wordnet": read_wordnet,
    "python": read_python,
}
