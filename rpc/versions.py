"""Which version a process runs, and whether two of them can work together.

Messages may get new fields at any time: who does not know them passes over them. `WIRE` grows when that is not enough,
because an older peer would misunderstand what it is told; `OLDEST_WIRE` is the last one that this version still takes
care not to confuse. Who is called looks at who calls; of nodes, the conductor looks at each pair.
"""

import functools
import importlib.metadata
from typing import Final

from moonpool_proto.v1.common_pb2 import Software

__all__ = ["OLDEST_WIRE", "WIRE", "named", "own_software", "package_version", "why_not_together"]

WIRE: Final = 2  # 1: versions were not told yet
OLDEST_WIRE: Final = 1


@functools.cache
def package_version() -> str:
    """Of this installation; "unknown" where nothing was installed."""
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def own_software(*, kv_wire: int = 0) -> Software:
    """Return the versions that this process reports; `kv_wire` is its messenger's protocol, 0 without one."""
    return Software(version=package_version(), wire=WIRE, oldest_wire=OLDEST_WIRE, kv_wire=kv_wire)


def named(software: Software) -> str:
    """For a sentence: "Moonpool 0.1.0 (wire 2)"."""
    if not software.wire:
        return "a Moonpool that does not tell its version (wire 1)"
    return f"Moonpool {software.version} (wire {software.wire})"


def why_not_together(one: Software, who: str, other: Software, whom: str) -> str:
    """ "" when the two can work together; else a sentence with both versions and what to do."""
    advice = "run versions that follow each other, and replace all of one before the next (docs: versions)"
    for new, old, newer, older in ((one, other, who, whom), (other, one, whom, who)):
        if (old.wire or 1) < new.oldest_wire:
            return (
                f"{newer} is {named(new)}, which needs wire {new.oldest_wire} or newer, and {older} is {named(old)}: "
                + advice
            )
    if one.kv_wire and other.kv_wire and one.kv_wire != other.kv_wire:
        return (
            f"{who} is {named(one)} and moves KV by protocol {one.kv_wire}, {whom} is {named(other)} and moves it by "
            f"{other.kv_wire}: stop all nodes of one version before the first one of the other starts (docs: versions)"
        )
    return ""
