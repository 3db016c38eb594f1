"""Loads the roles' modules with replacements of the modules through which they reach the world.

Each module of a role's package gets its own `__import__`, which returns the replacement for the names in `replaced`;
everything else, in particular third-party packages, gets the real module. Its `set` is iterated in the order of
insertion (see `world.ordered_set`), and the dictionaries in `_OF_EACH_PROCESS` are each simulated process's own, as its
locks are. The roles' code itself is unmodified.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tools.prove.world.ordered_set import OrderedSet
from tools.prove.world.per_process import EachProcessDict

ROLES = (
    "conductor",
    "decode_node",
    "engine",
    "frontend",
    "jit",
    "kvpool",
    "messenger",
    "moonpool",
    "moonpool_proto",
    "prefill_node",
    "rpc",
    "settings",
    "telemetry",
    "worker",
)
_OF_EACH_PROCESS = {"messenger.tcp.transport": ("_asked",)}
"""Dictionaries in which modules keep what happens at runtime."""


_patched: dict[str, str] = {}  # source by path relative to the repository


def patch(text: str) -> None:
    """Apply a unified diff of the roles' source when they are loaded. Raises ValueError if it does not apply."""
    root = Path(__file__).resolve().parents[2]
    for name, hunks in _parse(text):
        source = (root / name).read_text(encoding="utf-8")
        for before, after in hunks:
            if source.count(before) != 1:
                raise ValueError(
                    f"a hunk of {name} occurs {source.count(before)} times in it, expected once:\n{before}"
                )
            source = source.replace(before, after)
        _patched[str(root / name)] = source


def _parse(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (path, (lines before, lines after) of each hunk) of a unified diff."""
    files: list[tuple[str, list[tuple[str, str]]]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            files.append((line[6:].strip(), []))
        elif line.startswith("@@"):
            files[-1][1].append(("", ""))
        elif files and files[-1][1] and line[:1] in " +-":
            before, after = files[-1][1][-1]
            files[-1][1][-1] = (
                before + line[1:] if line[0] in " -" else before,
                after + line[1:] if line[0] in " +" else after,
            )
    return files


def install(replaced: Mapping[str, ModuleType]) -> None:
    """Load the roles' modules with replacements from now on. None of them may be loaded already."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in ROLES]
    if loaded:
        raise RuntimeError(f"loaded before the simulation was installed: {', '.join(loaded[:5])}")
    sys.meta_path.insert(0, _Finder(dict(replaced)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, replaced: Mapping[str, ModuleType]) -> None:
        self._replaced = replaced

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ROLES:
            return None
        if fullname in self._replaced:
            return importlib.machinery.ModuleSpec(fullname, _Ready(self._replaced[fullname]))
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._replaced)
        return spec


class _Ready(importlib.abc.Loader):
    """Loader of a role's module that is replaced as a whole."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, replaced: Mapping[str, ModuleType]) -> None:
        super().__init__(fullname, path)
        self._replaced = replaced

    def get_code(self, fullname: str) -> CodeType | None:
        if self.path in _patched:
            return self.source_to_code(_patched[self.path].encode(), self.path)
        return super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        known = vars(self._replaced.get("builtins", builtins))
        module.__dict__["__builtins__"] = {**known, "__import__": self._import, "set": OrderedSet}
        super().exec_module(module)
        for name in _OF_EACH_PROCESS.get(module.__name__, ()):
            setattr(module, name, EachProcessDict())

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 0 and name in self._replaced and name.partition(".")[0] not in ROLES:
            module = self._replaced[name]
            return module if fromlist or "." not in name else self._top(name, module)
        return builtins.__import__(name, globals, locals, fromlist, level)

    def _top(self, name: str, module: ModuleType) -> ModuleType:
        """Return the package for `import a.b`, with the replacement as its attribute."""
        top, _, rest = name.partition(".")
        if top in self._replaced:
            return self._replaced[top]
        package = ModuleType(top)
        package.__dict__.update(vars(importlib.import_module(top)))
        setattr(package, rest, module)
        return package
