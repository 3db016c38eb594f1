"""The tables of docs/engine.md are those of the engine's registries."""

from pathlib import Path

from engine.backends.registry import BACKENDS
from engine.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")


def rows_after(header: str) -> list[str]:
    """Return the rows of the table with this header."""
    lines = PAGE.splitlines()
    start = lines.index(header) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return lines[start:end]


def test_the_table_of_models_is_that_of_the_families() -> None:
    wanted = [f"| `{f.architecture}` | {f.examples} | {f.features} |" for f in FAMILIES.values()]
    assert rows_after("| architecture | models | beyond a plain decoder |") == wanted


def test_the_table_of_backends_is_that_of_the_registry() -> None:
    wanted = [f"| `{kind.name}` | {kind.chosen} | {kind.needs} |" for kind in BACKENDS.values()]
    assert rows_after("| `--engine-backend` | `auto` takes it | needs |") == wanted
