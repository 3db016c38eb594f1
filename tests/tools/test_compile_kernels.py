"""`.ci/compile_kernels.py`, which only `make setup` runs: the functions that it imports exist."""

import ast
import importlib
import pkgutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ast.parse((ROOT / ".ci" / "compile_kernels.py").read_text(encoding="utf-8"))
IMPORTS = [
    (node.module, alias.name) for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom) for alias in node.names
]


def test_every_imported_name_exists() -> None:
    assert len(IMPORTS) > 10
    assert [f"{module}:{name}" for module, name in IMPORTS if not exists(module, name)] == []


def exists(module: str | None, name: str) -> bool:
    found = importlib.import_module(module or "")
    paths = getattr(found, "__path__", [])
    return hasattr(found, name) or name in {each.name for each in pkgutil.iter_modules(paths)}
