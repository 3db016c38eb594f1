"""`moonpool explain` on logs that no conductor of this version wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonpool.cli import app


@pytest.mark.parametrize("more", [{}, {"at": 1}, {"at": 1, "model": "m", "input_length": "x"}])
def test_a_record_of_another_form_ends_in_a_sentence(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "log.json").write_text("{}")
    record = {"request_id": "x", "attempts": [{}], **more}
    (tmp_path / "decisions-000001.jsonl").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    done = CliRunner().invoke(app, ["decisions", "explain", "x", "--log", str(tmp_path)])
    assert done.exit_code == 1
    said = done.output.replace("\n", " ")
    assert ("of another version of Moonpool" if more else "No record of request 'x'") in said
