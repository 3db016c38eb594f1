"""The files in examples/ are run as their README says: a cluster from cluster.yaml, and every script against it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.docs.test_tutorials import ROOT, Reader, free_port

pytestmark = pytest.mark.long

EXAMPLES = ROOT / "examples"
SAYS = {
    "chat.py": [r"> Where does Tom live\?\n.*Rome", r"\n  [1-9]\d* of \d+ prompt tokens reused"],
    "agent.py": [r"turn 1: tool_use", r"weather\(\{'city': '(Oslo|Rome)'\}\) -> S", r"turn 2: end_turn, [1-9]"],
    "structured.py": [r"answer: \{'name': '(Mira|Tom)', 'city': '(Oslo|Rome)'\}"],
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    someone = Reader(tmp_path_factory.mktemp("examples"), free_port())
    yield someone
    someone.leave()


def test_the_readme_names_every_file() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert files == set(re.findall(r"^\| \[([\w.]+)\]", text, re.MULTILINE))
    assert {name for name in files if name.endswith(".py")} == SAYS.keys()


@pytest.mark.timeout(300)
def test_the_cluster_starts_and_every_script_does_what_it_says(reader: Reader) -> None:
    reader.run(f"moonpool serve --config {EXAMPLES / 'cluster.yaml'}")
    for name, patterns in SAYS.items():
        printed = reader.run(f"{sys.executable} {EXAMPLES / name}")
        for pattern in patterns:
            assert re.search(pattern, printed), f"{name} printed\n{printed}"
    reader.run(f"moonpool slo check {EXAMPLES / 'objectives.yaml'}")
