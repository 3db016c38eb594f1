"""Compilation of the CPU kernels: the functions that it imports exist."""

import ast
import asyncio
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from moonpool import kernel_compilation

ROOT = Path(__file__).resolve().parents[2]
TREE = ast.parse((ROOT / "moonpool" / "kernel_compilation.py").read_text(encoding="utf-8"))
IMPORTS = [
    (node.module, alias.name) for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom) for alias in node.names
]


def test_every_imported_name_exists() -> None:
    assert len(IMPORTS) > 10
    assert [f"{module}:{name}" for module, name in IMPORTS if not exists(module, name)] == []


async def test_what_the_cache_lacks_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    commands, shown = list[tuple[str, ...]](), list[str]()

    async def compiled(*command: str, **options: Any) -> Any:
        commands.append(command)
        for name in kernel_compilation.KERNELS:
            (tmp_path / f"{Path(name).stem}.f-1.py311.nbi").touch()
        return await run("true", **options)

    run = asyncio.create_subprocess_exec
    monkeypatch.setattr(kernel_compilation.asyncio, "create_subprocess_exec", compiled)
    assert kernel_compilation.observe_kernels().num_compiled == 0
    await kernel_compilation.compile_missing(shown.append)
    await kernel_compilation.compile_missing(shown.append)
    assert [command[-1] for command in commands] == ["moonpool.kernel_compilation"]
    assert len(shown) == 1
    assert "about a minute" in shown[0]


async def test_a_failed_compilation_is_shown_and_left_to_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_compilation.sys, "executable", "/bin/false")
    shown = list[str]()
    await kernel_compilation.compile_missing(shown.append)
    assert len(shown) == 2
    assert shown[1].startswith("compiling failed, the processes try again")


def exists(module: str | None, name: str) -> bool:
    found = importlib.import_module(module or "")
    paths = getattr(found, "__path__", [])
    return hasattr(found, name) or name in {each.name for each in pkgutil.iter_modules(paths)}
