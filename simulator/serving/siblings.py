"""KV of a sibling model in a simulated cluster: part of the conversations were computed by another model before.

The sibling's cluster is not simulated: its KV, and the hidden states that enter the layers of its reuse profile, are on
a host of the simulated one, take no room there, and have not left it.
"""

from dataclasses import dataclass
from random import Random

from conductor.policy.decisions import SiblingChoice
from conductor.policy.events import SiblingMatch, SiblingPoint
from simulator.errors import BadSetting
from simulator.serving.requests import Arrival
from worker.policy.reuse_profile import ReuseProfile

_HIDDEN_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class SiblingReuse:
    """The sibling's reuse profile, and the share of conversations whose prompts it has computed. Raises BadSetting."""

    profile: ReuseProfile
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise BadSetting(
                f"the share of conversations that a sibling computed must be from 0 to 1, got {self.share}"
            )
        if self.profile.dtype not in _HIDDEN_NBYTES:
            raise BadSetting(
                f"dtype of the reuse profile must be one of {', '.join(_HIDDEN_NBYTES)}, got {self.profile.dtype}"
            )

    def match(self, job: Arrival, roster: tuple[str, ...], seed: int) -> tuple[SiblingMatch, ...]:
        """Return what the sibling has of a request's prompt, on one of the pool nodes `roster`."""
        if not job.blocks or Random(f"{seed} sibling {job.conversation}").random() >= self.share:
            return ()
        pool, count, nbytes = roster[job.conversation % len(roster)], len(job.blocks), self._hidden_nbytes
        points = tuple(
            SiblingPoint(
                point.first,
                point.last,
                point.cost,
                point.quality_loss,
                *((pool, count, nbytes) if point.first else ()),
            )
            for point in self.profile.points
        )
        return (SiblingMatch(self.profile.sender_fingerprint, pool, count, points),)

    def cost_of(self, choice: SiblingChoice) -> float:
        """Return the share of a prefill's work that the choice leaves."""
        spans = {(point.first, point.last): point.cost for point in self.profile.points}
        return spans[choice.first_layer, choice.last_layer]

    def read_nbytes(self, choice: SiblingChoice, tokens: int, kv_nbytes: int) -> int:
        """Return the bytes to read for `tokens` whose KV has `kv_nbytes`: layers not computed, and hidden states."""
        computed = choice.last_layer - choice.first_layer + 1
        hidden = tokens * self._hidden_nbytes if choice.first_layer else 0
        return kv_nbytes * (self.profile.num_layers - computed) // self.profile.num_layers + hidden

    @property
    def _hidden_nbytes(self) -> int:
        return self.profile.hidden_size * _HIDDEN_NBYTES[self.profile.dtype]
