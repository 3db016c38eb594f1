"""The context of one placement: what every step of it reads."""

from dataclasses import dataclass

from conductor.policy.costs import ModelCosts
from conductor.policy.events import RequestArrived
from conductor.policy.fast_dataclass import fast_dataclass
from conductor.policy.nodes import ModelNodes
from conductor.policy.requests import Claim
from conductor.policy.state import ClusterState

__all__ = ["PlacementContext"]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The request to place at `now_ns`, its model's nodes and costs, and the state of the cluster."""

    now_ns: int
    state: ClusterState
    request: RequestArrived
    model: ModelNodes
    costs: ModelCosts
    former: Claim | None  # of an earlier attempt
