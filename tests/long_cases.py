"""Cases of a parametrised test of which `make test` runs only some."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_long(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the cases for `parametrize`: those that are not `kept` are marked long."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
