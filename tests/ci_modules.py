"""Modules of .ci, which is no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CI = Path(__file__).parents[1] / ".ci"


def ci_module(name: str) -> ModuleType:
    """Return a fresh .ci/NAME.py, which may import its neighbours."""
    sys.path.insert(0, str(CI))
    try:
        spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(CI))
    return found
