"""The tutorial of docs/small-kv.md holds: its model is written, has the KV that the page says, and reuses a prompt."""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontend.processes import cluster
from engine import check_folder
from worker.slot_memory import spec_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "small-kv.md").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = re.search(r"python (-m engine\.random_model .*?)\n\.venv", PAGE, re.DOTALL)
    assert command is not None
    arguments = shlex.split(command[1].replace("\\\n", " "))
    arguments[2] = str(tmp_path_factory.mktemp("page") / "model")
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, timeout=120)
    return Path(arguments[2])


def test_the_pages_model_has_the_pages_kv(model: Path) -> None:
    config = check_folder(model)
    assert config.kv_layers == (0, 1, 2, 3)
    spec = spec_of(config.kv_groups("float32"), block_tokens=16)
    said = re.search(r"It needs ([\d,]+) bytes of KV per token .*? would\s+need\s+([\d,]+)\.", PAGE, re.DOTALL)
    assert said is not None
    needed, plain = (int(number.replace(",", "")) for number in said.groups())
    assert spec.bytes_per_token == needed
    assert plain == config.num_layers * config.num_heads * 2 * config.head_dim * 4


@pytest.mark.long
def test_the_second_question_reuses_what_the_page_says(model: Path, tmp_path: Path) -> None:
    serve = re.search(r"moonpool serve out/small-kv (.*?) --port", PAGE)
    question = re.search(r"curl http://127\.0\.0\.1:8000(\S+) .*? -d '(.*?)'\n", PAGE, re.DOTALL)
    said = re.search(r"Of the (\d+) tokens .*? says (\d+) the first\s+time and (\d+) the second", PAGE, re.DOTALL)
    assert serve is not None
    assert question is not None
    assert said is not None
    tokens, first, second = map(int, said.groups())
    with cluster(model, tmp_path, *shlex.split(serve[1])) as served:
        answers = [_post(served.url + question[1], question[2]) for _ in range(2)]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [tokens] * 2
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [first, second]
    assert answers[0]["choices"] == answers[1]["choices"]


def _post(url: str, body: str) -> dict[str, Any]:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
