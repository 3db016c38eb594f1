"""`moonpool keys`: a key goes to its owner alone, its hash into the file; revoking it changes no other key."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


HASHES = [f"sha256:{digit * 64}" for digit in "0123"]
BY_HAND = f"""\
# ours
keys:
  # the first
  - name: a   # of May
    hash: {HASHES[0]}
    tenant: t
    requests_per_minute: 5
    slo_classes: [x, y]

  # the second
  - {{name: b, hash: '{HASHES[1]}', tenant: u, scope: admin}}
  - tenant: t
    name: c
    hash: {HASHES[2]}
    expires: 2020-01-01
# the end
"""


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def callers(text: str) -> dict[str, Any]:
    return {entry.name: caller for entry, caller in callers_of(parse_keys(text))}


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(BY_HAND)
    return path


def test_a_list_shows_who_may_do_what_and_no_hash(by_hand: Path) -> None:
    shown = run("list", "--file", str(by_hand))
    assert shown.exit_code == 0, shown.output
    rows = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert all(text in rows["a"] for text in ("t ", "user", "never", "requests_per_minute 5", "x, y"))
    assert all(text in rows["b"] for text in ("u ", "admin", "none", "all"))
    assert "2020-01-01" in rows["c"]
    assert "(expired)" in shown.stdout
    found = json.loads(run("list", "--json", "--file", str(by_hand)).stdout)
    assert [(row["name"], row["expired"], row["limits"]) for row in found] == [
        ("a", False, {"requests_per_minute": 5}),
        ("b", False, {}),
        ("c", True, {"requests_per_minute": 5}),
    ]
    assert not any(digit * 8 in shown.stdout + json.dumps(found) for digit in "0123")


def test_a_revoked_key_is_gone_and_its_tenant_keeps_its_limits(by_hand: Path) -> None:
    by_hand.chmod(0o640)
    before = callers(BY_HAND)
    revoked = run("revoke", "a", "--file", str(by_hand))
    assert revoked.exit_code == 0, revoked.output
    text = by_hand.read_text()
    assert callers(text) == {name: before[name] for name in "bc"}
    assert all(comment in text for comment in ("# ours", "# the first", "# the second", "# the end"))
    assert by_hand.stat().st_mode & 0o777 == 0o640
    for name in "bc":
        assert run("revoke", name, "--file", str(by_hand)).exit_code == 0
    assert parse_keys(by_hand.read_text()) == []


def test_a_key_that_cannot_be_revoked_is_said_to_be(by_hand: Path) -> None:
    unknown = run("revoke", "d", "--file", str(by_hand))
    assert (unknown.exit_code, "a, b, c" in unknown.output) == (2, True)
    assert by_hand.read_text() == BY_HAND
    in_a_line = f"keys: [{{name: a, hash: '{HASHES[0]}', tenant: t}}, {{name: b, hash: '{HASHES[1]}', tenant: t}}]\n"
    by_hand.write_text(in_a_line)
    refused = run("revoke", "a", "--file", str(by_hand))
    assert (refused.exit_code, "by hand" in refused.output) == (2, True)
    assert by_hand.read_text() == in_a_line
    missing = run("revoke", "a", "--file", str(by_hand.with_name("none.yaml")))
    assert (missing.exit_code, "none.yaml" in missing.output) == (2, True)
    assert "creates it with a first key" in missing.output


@st.composite
def files(draw: st.DrawFn) -> str:
    """Valid files as people write them: blocks and flows, comments, blank lines, with or without a last newline."""
    indent = " " * draw(st.integers(0, 4))
    lines = ["keys:"]
    shared = {tenant: draw(st.sampled_from([{}, {"max_concurrent": 3}, {"cache_salt": "s"}])) for tenant in "tu"}
    for number in range(draw(st.integers(1, 4))):
        fields: dict[str, Any] = {"name": f"k{number}", "hash": HASHES[number], "tenant": draw(st.sampled_from("tu"))}
        fields |= shared[fields["tenant"]] if draw(st.booleans()) else {}
        written = [f"{name}: {json.dumps(value)}" for name, value in draw(st.permutations(list(fields.items())))]
        lines += [f"{indent}# before" for _ in range(draw(st.integers(0, 1)))]
        if draw(st.booleans()):
            lines.append(f"{indent}- {{{', '.join(written)}}}{draw(st.sampled_from(['', '  # note']))}")
        else:
            gap = " " * draw(st.integers(1, 3))
            lines.append(f"{indent}-{gap}{written[0]}")
            lines += [f"{indent} {gap}{line}" for line in written[1:]]
        lines += ["" for _ in range(draw(st.integers(0, 1)))]
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n# end\n"]))


@given(files(), st.data())
def test_revoking_a_key_changes_no_other_key(tmp_path_factory: Any, text: str, data: Any) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(text)
    before = callers(text)
    name = data.draw(st.sampled_from(sorted(before)))
    revoked = run("revoke", name, "--file", str(path))
    if revoked.exit_code:  # limits would have to move into an entry that is written in one line
        assert "by hand" in revoked.output
        assert path.read_text() == text
        assert "{" in text
        assert "max_concurrent" in text or "cache_salt" in text
    else:
        assert callers(path.read_text()) == {each: caller for each, caller in before.items() if each != name}
