"""Versions of a process, and the compatibility check of two processes.

Messages may gain fields at any time; receivers ignore unknown ones. `WIRE` is incremented when that is not enough,
because an older peer would misunderstand a message. `OLDEST_WIRE` is the oldest version still supported. The callee
checks its caller; the conductor checks each pair of nodes.
"""

import functools
import importlib.metadata
from typing import Final

from moonpool_proto.v1.common_pb2 import Software

__all__ = ["OLDEST_WIRE", "WIRE", "named", "own_software", "package_version", "why_not_together"]

WIRE: Final = 4  # 1: before versions were reported; 2: before rolling windows; 3: before siblings' KV
OLDEST_WIRE: Final = 1


@functools.cache
def package_version() -> str:
    """Return the installed package's version; "unknown" if it is not installed."""
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def own_software(*, kv_wire: int = 0) -> Software:
    """Return the versions that this process reports; `kv_wire` is its messenger's protocol, 0 without one."""
    return Software(version=package_version(), wire=WIRE, oldest_wire=OLDEST_WIRE, kv_wire=kv_wire)


def named(software: Software) -> str:
    """Format a version for messages: "Moonpool 0.1.0 (wire 2)"."""
    if not software.wire:
        return "a Moonpool that does not report its version (wire 1)"
    return f"Moonpool {software.version} (wire {software.wire})"


def why_not_together(one: Software, who: str, other: Software, whom: str) -> str:
    """Return "" if the two are compatible, otherwise an error text with both versions and advice."""
    advice = "run consecutive versions only, and finish one upgrade before the next (docs: versions)"
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
