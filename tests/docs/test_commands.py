"""Every command line in the documentation is one that the program takes."""

import dataclasses
import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conductor.policy.objectives import Objective, parse_record, record_to_plain
from moonpool.cli import app
from moonpool.commands.lazy import every_command
from moonpool.config import all_settings

ROOT = Path(__file__).parents[2]
OBJECTIVES = "docs/objectives.md"
# Said of other programs, or of no command line.
OTHER_VARIABLES = {"MOONPOOL_READY", "MOONPOOL_CONFIG", "MOONPOOL_URL"}
# Of `moonpool` itself.
TOP_FLAGS = {"--help", "--version", "--install-completion", "--show-completion"}


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    """moonpool's commands as click parses them, by full name."""
    return every_command(app)


@pytest.fixture(scope="module")
def complaint(commands: dict[str, Any]) -> Callable[[list[str]], str]:
    """Return the parser's complaint about these arguments; "" for none. Runs no command."""

    def parse(arguments: list[str]) -> str:
        name, *rest = arguments
        groups = {path.split()[0] for path in commands if " " in path}
        if name in groups and rest and not rest[0].startswith("-"):
            name, *rest = f"{name} {rest[0]}", *rest[1:]
        if name in TOP_FLAGS or (name in groups and rest == ["--help"]):
            return ""
        if name not in commands:
            return f"no command {name!r}"
        try:
            commands[name].make_context(name, rest)
        except Exception as error:  # click's, of which typer may bring its own
            if type(error).__name__ == "Exit":
                return ""
            return str(getattr(error, "message", error)) or type(error).__name__
        return ""

    return parse


@pytest.fixture(scope="module")
def targets() -> tuple[set[str], set[str]]:
    """(targets, variables) of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", text, re.MULTILINE)), set(re.findall(r"^([A-Z_]+) \?=", text, re.MULTILINE))


def words(line: str) -> list[str]:
    """The line's words as far as a redirection; a shell variable stands for a number."""
    found = shlex.split(re.sub(r"\$\{?\w+\}?", "1", line), comments=True)
    return found[: found.index(">")] if ">" in found else found


def moonpool_arguments(line: str) -> list[str] | None:
    """Return the arguments of `moonpool` on this line; None when the line is of another program."""
    called = re.match(r"(\.venv/bin/)?(python -m )?moonpool(?= )", line)
    return words(line[called.end() :]) if called else None


def test_the_parser_refuses_what_is_wrong(complaint: Callable[[list[str]], str]) -> None:
    assert complaint(["serve", "--port", "80"]) == ""
    assert "no command" in complaint(["sevre"])
    assert complaint(["serve", "--porrt", "80"])
    assert complaint(["replay"])
    assert complaint(["replay", "conversation", "--speed", "fast"])
    assert complaint(["bench", "serve", "--goodput", "ttft:1", "tpot:1", "--num_prompts", "2"]) == ""
    assert complaint(["bench", "serve", "--num-prompts", "many"])
    assert "no command" in complaint(["bench", "sevre"])
    assert complaint(["simulate", "cache", "conversation", "--capacity", "10k"]) == ""
    assert complaint(["simulate", "cache", "conversation"])


def test_moonpool_takes_every_command_line(
    command_lines: list[tuple[str, str]], complaint: Callable[[list[str]], str]
) -> None:
    calls = [(page, line, found) for page, line in command_lines if (found := moonpool_arguments(line)) is not None]
    assert len(calls) >= 10
    assert [f"{page}: {line}: {why}" for page, line, found in calls if (why := complaint(found))] == []


def test_moonpool_takes_every_command_in_the_text(pages: list[Any], complaint: Callable[[list[str]], str]) -> None:
    spans = [(str(page), code) for page in pages for code in page.inline() if re.match(r"moonpool [a-z-]", code)]
    assert spans
    # Without arguments a command is only named.
    calls = [(page, code, words(code)[1:]) for page, code in spans]
    wrong = [
        f"{page}: {code}: {why}"
        for page, code, found in calls
        if (why := complaint(found if len(found) > 1 else [*found, "--help"]))
    ]
    assert wrong == []


def test_every_flag_in_the_text_is_some_commands(pages: list[Any], commands: dict[str, Any]) -> None:
    known = {
        flag
        for command in commands.values()
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
    }
    named = {
        (str(page), flag)
        for page in pages
        for code in page.inline()
        if code.startswith(("-", "moonpool"))
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", code)
    }
    assert named
    assert sorted(f"{page}: {flag}" for page, flag in named if flag not in known | TOP_FLAGS) == []


def test_every_variable_is_read(pages: list[Any]) -> None:
    known = {declared.variable for declared in all_settings().values()} | OTHER_VARIABLES
    named = {(str(page), name) for page in pages for name in re.findall(r"\bMOONPOOL_[A-Z_]*[A-Z]\b", page.text)}
    assert ("docs/operations.md", "MOONPOOL_POOL_BYTES") in named
    assert sorted(f"{page}: {name}" for page, name in named if name not in known) == []


def test_objectives_in_the_text_are_such_a_record(pages: list[Any]) -> None:
    (page,) = [page for page in pages if str(page) == OBJECTIVES]
    (block,) = page.blocks("yaml")
    record = parse_record(yaml.safe_load(block))
    assert record.classes["chat"].ttft == Objective(times=5, percentile=95)
    assert set(record_to_plain(record)) == {field.name for field in dataclasses.fields(record)}


def test_every_key_of_a_file_is_read(pages: list[Any]) -> None:
    lines = [
        (str(page), found[1])
        for page in pages
        if str(page) != OBJECTIVES  # whose files are others
        for text in (*page.inline(), *"\n".join(page.blocks("yaml")).splitlines())
        if (found := re.match(r"([a-z]+_[a-z_]+): \S", text))
    ]
    assert ("docs/operations.md", "pool_bytes") in lines
    assert [f"{page}: {key}" for page, key in lines if key not in all_settings()] == []


def test_make_has_every_target(
    command_lines: list[tuple[str, str]], pages: list[Any], targets: tuple[set[str], set[str]]
) -> None:
    spans = [(str(page), code) for page in pages for code in page.inline()]
    calls = [(page, words(line)[1:]) for page, line in (*command_lines, *spans) if line.startswith("make ")]
    assert len(calls) >= 5
    wrong = [
        f"{page}: make {word}"
        for page, found in calls
        for word in found
        if (word.split("=")[0] not in targets[1] if "=" in word else word not in targets[0])
    ]
    assert wrong == []


def test_every_module_run_by_name_exists(command_lines: list[tuple[str, str]]) -> None:
    modules = {(page, found[1]) for page, line in command_lines if (found := re.search(r"python -m ([\w.]+)", line))}
    assert modules
    assert [f"{page}: {name}" for page, name in sorted(modules) if importlib.util.find_spec(name) is None] == []


def test_every_path_given_to_pytest_exists(command_lines: list[tuple[str, str]]) -> None:
    paths = [
        (page, word)
        for page, line in command_lines
        if "-m pytest" in line
        for word in words(line)
        if word.startswith("tests/")
    ]
    assert paths
    assert [f"{page}: {path}" for page, path in paths if not (ROOT / path).exists()] == []


def test_python_and_json_blocks_parse(pages: list[Any]) -> None:
    for page in pages:
        for block in page.blocks("python"):
            compile(block, str(page), "exec")
        for block in page.blocks("json"):
            json.loads(block)
