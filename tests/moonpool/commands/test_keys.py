"""`moonpool keys new`: the key goes to its owner alone, its hash into the file."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from frontend.api_keys import ApiKeys
from frontend.callers import Quota
from frontend.keys_file import callers_of, parse_keys
from moonpool.commands.keys import app


def new(*flags: str) -> Any:
    return CliRunner().invoke(app, ["new", *flags])


def test_a_drawn_key_is_let_in_by_the_file_that_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = new("--name", "a", "--tenant", "t", "--admin", "--expires", "2099-01-01", "--file", str(path))
    limits = ("--max-concurrent", "3", "--slo-class", "chat", "--slo-class", "batch")
    second = new("--name", "b", "--tenant", "u", *limits, "--file", str(path))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    drawn = [each.stdout.strip() for each in (first, second)]
    assert all(key.startswith("mp-") and len(key) > 40 for key in drawn)
    assert len(set(drawn)) == 2
    text = path.read_text()
    assert not any(key in text for key in drawn)
    assert path.stat().st_mode & 0o077 == 0
    keys = ApiKeys(required=True)
    keys.replace(callers_of(parse_keys(text)))
    assert keys.admin(f"Bearer {drawn[0]}").tenant == "t"
    caller = keys.caller(f"Bearer {drawn[1]}")
    assert (caller.quota, caller.slo_classes) == (Quota(max_concurrent=3), ("batch", "chat"))


def test_without_a_file_the_entry_is_shown_beside_the_key() -> None:
    shown = new("--name", "a", "--tenant", "t")
    key = shown.stdout.strip()
    assert f"hash: sha256:{hashlib.sha256(key.encode()).hexdigest()}" in shown.stderr
    assert key not in shown.stderr


def test_what_would_be_of_no_use_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    assert new("--name", "a", "--tenant", "t", "--file", str(path)).exit_code == 0
    before = path.read_text()
    for flags in (
        ["a", "--tenant", "t"],
        ["b", "--tenant", "a b"],
        ["b", "--tenant", "t", "--expires", "soon"],
        ["b", "--tenant", "t", "--slo-class", "a b"],
    ):
        refused = new("--name", *flags, "--file", str(path))
        assert refused.exit_code == 2, refused.output
        assert "mp-" not in refused.output
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize(
    "before", ["keys: []\n", "# ours\nkeys:\n", "# ours\nkeys:\n  - {entry}\n", "keys:\n- {entry}\n# the end"]
)
def test_a_file_written_by_hand_keeps_its_form_and_what_stands_beside(tmp_path: Path, before: str) -> None:
    path = tmp_path / "keys.yaml"
    written = before.replace("{entry}", f"{{name: old, hash: 'sha256:{'0' * 64}', tenant: t, scope: user}}  # of May")
    path.write_text(written)
    path.chmod(0o640)
    added = new("--name", "a", "--tenant", "t", "--file", str(path))
    assert added.exit_code == 0, added.output
    text = path.read_text()
    assert [entry.name for entry in parse_keys(text)] == (["old", "a"] if "{entry}" in before else ["a"])
    assert [line for line in written.splitlines() if "#" in line and line not in text] == []
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_wrong_before_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: 3\n")
    refused = new("--name", "a", "--tenant", "t", "--file", str(path))
    assert refused.exit_code == 2
    assert "is invalid" in refused.output
    assert path.read_text() == "keys: 3\n"
