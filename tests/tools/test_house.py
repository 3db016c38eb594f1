"""The house rules: each breach is found and named, in whatever package it is, and a clean tree passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2] / "tools" / "house.py"
PROJECT = """
[tool.hatch.build.targets.wheel]
packages = ["conductor", "moonpool"]
[tool.mypy]
packages = ["conductor", "moonpool", "tools"]
"""
CLEAN = '''"""Place requests."""

def place(request_id: str) -> str:
    """Return the node of the request."""
    return request_id
'''


def measure(root: Path, files: dict[str, str]) -> tuple[int, str, dict[str, int]]:
    """Return the exit status, the output and the figures for a tree of `files`."""
    for name, text in {"pyproject.toml": PROJECT, "conductor/place.py": CLEAN, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    done = subprocess.run([sys.executable, HOUSE, root], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_a_clean_tree_passes_and_its_figures_are_reported(tmp_path: Path) -> None:
    status, _, figures = measure(tmp_path, {"moonpool/run.py": "import conductor.place\n\nNUMBER = 1  # one\n"})
    assert status == 0
    assert (figures["shipped_files"], figures["moonpool_lines"], figures["files_naming_a_request"]) == (2, 3, 1)


@pytest.mark.parametrize(
    ("rule", "files", "named"),
    [
        (
            "import_cycles",
            {"moonpool/a.py": "from moonpool import b\n", "moonpool/b.py": "def f():\n    import moonpool.a\n"},
            "moonpool.a <-> moonpool.b",
        ),
        (
            "long_signatures",
            {"tools/a.py": "def wide(a, b, c, d, e, *, f, g, h, i): ...\n"},
            "wide has 9 parameters",
        ),
        ("fragment_docstrings", {"tests/test_a.py": '"""Whether it works."""\n'}, "Whether it works."),
        (
            "keys_declared_twice",
            {
                "moonpool/a.py": "class First:\n    wait_s: Annotated[float, Key(unit='s')] = 1.0\n",
                "conductor/b.py": "class SecondConfig:\n    wait: float = 2.0\n",
            },
            "wait: conductor.b.SecondConfig, moonpool.a.First",
        ),
        (
            "classes_defined_twice",
            {
                "moonpool/a.py": "class Place: ...\n",
                "tools/b.py": "class Place: ...\n",
                "tests/c.py": "class Place: ...\n",
            },
            "Place: moonpool.a, tools.b",
        ),
        (
            "missing_imports",
            {".ci/a.py": "def f():\n    from conductor.place import put\n"},
            "put is not in conductor.place",
        ),
    ],
)
def test_each_breach_fails_and_is_named(tmp_path: Path, rule: str, files: dict[str, str], named: str) -> None:
    status, output, figures = measure(tmp_path, files)
    assert status == 1
    assert figures[rule] == 1
    assert named in output


def test_commands_may_have_any_number_of_flags(tmp_path: Path) -> None:
    flags = ", ".join(f"f{i}: Annotated[int, typer.Option()] = {i}" for i in range(12))
    assert measure(tmp_path, {"moonpool/a.py": f"def command({flags}): ...\n"})[0] == 0
