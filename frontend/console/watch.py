"""The console's state, built at most once a second, shared by all viewers, and only while there is a viewer."""

import asyncio
import gzip
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from frontend.cluster import ClusterWatch
from frontend.conductor import ConductorClient
from frontend.console.figures import cluster_figures, past_figures
from frontend.console.shared_build import SharedBuild
from moonpool_proto.v1 import conductor_pb2
from rpc.control import CallRefused, ControlError

_log = logging.getLogger(__name__)


_EVERY_S: Final = 1.0
_ASK_S: Final = 2.0
_PARTS: Final = ("workers", "slice_s", "slices", "requests", "hottest", "objectives", "slo")
_FORGET_S: Final = 900.0  # time for which the last overview of an unreachable conductor is shown


@dataclass(frozen=True)
class ConsoleState:
    """Encoded state: plain JSON and gzip."""

    plain: bytes
    packed: bytes


@dataclass
class _LastOverview:
    """Last overview of one conductor."""

    overview: dict[str, Any] | None = None
    at_s: float = 0.0  # the monotonic clock
    problem: str = ""
    slices: dict[int, Any] = field(default_factory=dict)  # by number

    def take(self, overview: dict[str, Any], now_s: float) -> None:
        """Take a new overview.

        A conductor sends a finished slice only once, so slices are kept. Raises KeyError if a part is missing.
        """
        for part in _PARTS:
            overview[part]
        if self.overview is None or self.overview["incarnation"] != overview["incarnation"]:
            self.slices.clear()
        self.slices.update({each["number"]: each for each in overview["slices"]})
        if self.slices:
            oldest = max(self.slices) - round(_FORGET_S / overview["slice_s"])
            self.slices = {number: each for number, each in self.slices.items() if number > oldest}
        self.overview = overview | {"slices": [self.slices[number] for number in sorted(self.slices)]}
        self.at_s, self.problem = now_s, ""

    @property
    def first_slice(self) -> int:
        """Number of the newest slice received, which may have grown since."""
        return max(self.slices, default=0)


class ConsoleWatch:
    """Builder of the console's state from `about()` (this frontend's data), the cluster and the conductors."""

    def __init__(
        self, conductor: ConductorClient, cluster: ClusterWatch, about: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._conductor = conductor
        self._cluster = cluster
        self._about = about
        self._last_overviews: dict[str, _LastOverview] = {}
        self._shared = SharedBuild(self._build, _EVERY_S)

    async def state(self) -> ConsoleState:
        """Return the state, at most one second old plus the conductors' response time."""
        return await self._shared.get()

    async def close(self) -> None:
        """Stop building."""
        await self._shared.close()

    async def _build(self) -> ConsoleState:
        targets = self._conductor.targets
        await asyncio.gather(*(self._ask(target) for target in targets))
        now_s, at_s = monotonic(), time.time()
        fresh = [
            last.overview
            for target in targets
            if (last := self._last_overviews[target]).overview is not None and now_s - last.at_s < _FORGET_S
        ]
        state = {
            "at_s": at_s,
            "front_door": dict(self._about()),
            "problem": self._cluster.problem,
            "age_s": self._cluster.age_s,
            "conductors": [self._conductor_figures(target, now_s) for target in targets],
            **cluster_figures(self._cluster.reply, fresh),
            **past_figures(fresh, at_s),
        }
        return await asyncio.to_thread(_encoded, state)

    async def _ask(self, target: str) -> None:
        last = self._last_overviews.setdefault(target, _LastOverview())
        request = conductor_pb2.OverviewRequest(first_slice=last.first_slice)
        try:
            reply = await self._conductor.ask(
                "Overview", lambda stub: stub.Overview(request), target=target, deadline_s=_ASK_S
            )
            last.take(json.loads(reply.json, parse_constant=lambda _: None), monotonic())
        except CallRefused as error:
            last.problem = (
                "its version does not support overviews" if error.code == "UNIMPLEMENTED" else f"refused: {error}"
            )
        except ControlError as error:
            last.problem = f"does not answer: {error}"
        except (ValueError, KeyError, TypeError) as error:  # from another version
            _log.warning("the overview of the conductor at %s cannot be read: %r", target, error)
            last.problem = f"its overview cannot be read: {error!r}"

    def _conductor_figures(self, target: str, now_s: float) -> dict[str, Any]:
        last = self._last_overviews[target]
        overview = last.overview or {}
        slo = overview.get("slo") or {}
        return {
            "target": target,
            "is_asked": target == self._conductor.target,
            "problem": last.problem,
            "age_s": None if last.overview is None else now_s - last.at_s,
            # A string, because JavaScript numbers have too few digits
            "incarnation": str(overview.get("incarnation", "")),
            "admission": overview.get("admission", ""),
            "mode": overview.get("mode", ""),
            "has_decision_log": overview.get("has_decision_log", False),
            "slo_version": slo.get("version"),
            "remembered": overview.get("remembered", 0),
            "decided": overview.get("decided"),  # None until it has answered
        }


def _encoded(state: Mapping[str, Any]) -> ConsoleState:
    plain = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
    return ConsoleState(plain, gzip.compress(plain, compresslevel=1, mtime=0))
