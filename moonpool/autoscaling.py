"""How many workers each group shall have, by what the conductors say that is needed and the bounds given. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.errors import ConfigError
from moonpool.plan import Group
from moonpool.scaling import MAX_WORKERS

__all__ = ["Bounds", "autoscaled", "parse_bounds"]

_FORM = re.compile(r"([^=]+)=(\d{1,4}):(\d{1,4})")
Desired = Mapping[str, Mapping[str, int]]  # by model and role


@dataclass(frozen=True)
class Bounds:
    """A group has at least, and at most, so many workers."""

    least: int
    most: int


def parse_bounds(given: Sequence[str], groups: Mapping[str, Group]) -> dict[str, Bounds]:
    """By group, of `prefill=1:4`. Raises ConfigError, naming what was expected."""
    found: dict[str, Bounds] = {}
    for text in given:
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(f"--autoscale {text!r}: expected ROLE=MIN:MAX, for example decode=1:4")
        name, least, most = form[1], int(form[2]), int(form[3])
        if name not in groups:
            raise ConfigError(f"--autoscale {text!r}: {name!r} cannot be scaled: expected one of {', '.join(groups)}")
        if name in found:
            raise ConfigError(f"--autoscale names {name} twice")
        if not 1 <= least <= most <= MAX_WORKERS:
            raise ConfigError(f"--autoscale {text!r}: expected 1 <= MIN <= MAX <= {MAX_WORKERS}")
        found[name] = Bounds(least, most)
    return found


def autoscaled(
    bounds: Mapping[str, Bounds], groups: Mapping[str, Group], present: Mapping[str, int], told: Sequence[Desired]
) -> dict[str, int]:
    """Workers that each bounded group shall have. `told`: what each conductor that answers says is needed; each knows a
    part of the demand, so the largest counts. Where none says anything, as many as there are stay.
    """
    wanted = {}
    for name, own in bounds.items():
        group = groups[name]
        needs = [desired.get(group.model.name, {}).get(group.role) for desired in told]
        need = max((count for count in needs if count is not None), default=present.get(name, 0))
        wanted[name] = min(own.most, max(own.least, need))
    return wanted
