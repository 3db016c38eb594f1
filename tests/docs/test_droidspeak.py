"""The tutorial of docs/droidspeak.md holds: the profile has the page's group, and the fine-tune answers with it."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.frontend.processes import cluster

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "droidspeak.md").read_text()
TUTORIAL = PAGE[PAGE.index("## Try it") : PAGE.index("## Limits")]


def run(command: str, work: Path) -> None:
    arguments = shlex.split(command.replace("out/", f"{work}/"))
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True, timeout=300)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page has `out`: the questions and the profile are written as it says."""
    folder = tmp_path_factory.mktemp("out")
    questions, profile = (
        re.search(rf"^\.venv/bin/{name}(.*)$", TUTORIAL, re.MULTILINE) for name in ("python -m ", "moonpool droidspeak")
    )
    assert questions is not None
    assert profile is not None
    run(questions[1], folder)
    run(f"moonpool droidspeak{profile[1]}", folder)
    return folder


def test_the_profile_has_the_pages_group(work: Path) -> None:
    said = re.search(r"has one group: computing layers (\d+) to (\d+)", TUTORIAL)
    assert said is not None
    points = json.loads((work / "reuse.json").read_text())["profile"]["points"]
    assert [(point["first"], point["last"]) for point in points] == [(int(said[1]), int(said[2]))]
    assert (work / "reuse.svg").read_text().startswith("<?xml")


def test_the_second_agent_answers_with_the_first_ones_kv(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = re.search(r"^\.venv/bin/moonpool serve (.*) --port", TUTORIAL, re.MULTILINE)
    first, second = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
    said = re.search(r"right answer, \*(.*?)\*, and that of the (\d+) tokens of the prompt, (\d+)\s+have", TUTORIAL)
    assert serve is not None
    assert said is not None
    monkeypatch.chdir(work.parent)
    with cluster(ROOT / "moonpool/data/model", work / "cluster", *flags_of(serve[1], work)) as served:
        names: dict[str, object] = {}
        exec(first.replace("http://127.0.0.1:8000", served.url).replace("out/", f"{work}/"), names)
        subprocess.run([sys.executable, "-m", "moonpool", "validate", "--wait", "30", "--url", served.url], check=True)
        with redirect_stdout(StringIO()) as printed:
            exec(second, names)
    assert printed.getvalue().strip() == f"{said[1]} {said[2]} {said[3]}"


def flags_of(command: str, work: Path) -> list[str]:
    """Return the page's flags with this repository's and this test's folders."""
    return shlex.split(command.replace("tests/data", f"{ROOT}/tests/data").replace("out/", f"{work}/"))
