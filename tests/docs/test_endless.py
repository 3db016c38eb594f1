"""The tutorial of docs/endless.md holds: with a window, an answer goes on beyond the model's positions."""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frontend.processes import cluster

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "endless.md").read_text()


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream; leaving the iteration disconnects."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@pytest.mark.long
def test_an_answer_goes_on_beyond_the_models_positions(tmp_path: Path) -> None:
    make = re.search(r"python (-m engine\.random_model .*)", PAGE)
    question = re.search(r"curl -N http://127\.0\.0\.1:8000(\S+) .*? -d '(.*?)'\n", PAGE, re.DOTALL)
    said = re.search(r"ends after (\d+) tokens of prompt and answer", PAGE)
    assert make is not None
    assert question is not None
    assert said is not None
    arguments = shlex.split(make[1])
    arguments[2] = str(tmp_path / "model")
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, timeout=120)
    body = json.loads(question[2]) | {"return_token_ids": True}
    with cluster(tmp_path / "model", tmp_path) as served:
        count = 0
        for event in events(served.url + question[1], body):
            count += len(event["choices"][0].get("token_ids") or ())
            if count > 3 * int(said[1]):
                break
        assert count > 3 * int(said[1])
        usage = {"stream_options": {"include_usage": True}}
        *_, last, total = events(served.url + question[1], body | {"endless": True} | usage)
        assert last["choices"][0]["finish_reason"] == "length"
        assert total["usage"]["total_tokens"] == int(said[1])
