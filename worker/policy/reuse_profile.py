"""Reuse profiles: which layers a model computes itself when it reuses the KV of another model's prompt.

The two models were tuned from the same base. The receiver takes the sender's KV, except for one group of consecutive
layers, which it computes from the sender's hidden states (DroidSpeak: Liu et al. 2024, §4). A profile contains the
groups that are worth choosing from: no other group is both cheaper and as good. The file is JSON, parsed strictly.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from worker.policy.profile_file import STRICT, ProfileFile

__all__ = ["ReuseAccuracy", "ReusePoint", "ReuseProfile", "load_reuse_profile", "save_reuse_profile"]

Share = Annotated[float, Field(ge=0, le=1)]
Layer = Annotated[int, Field(ge=0)]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True, slots=True, config=STRICT)
class ReusePoint:
    """A group of layers, `first` to `last`, that the receiver computes; `cost` is its share of a prefill's work.

    `quality_loss` is the part of the receiver's lead over the sender that is lost: 0 if answers are as good as the
    receiver's own, 1 if they are as bad as the sender's. It may be slightly negative. `loss_interval` contains it with
    95 % confidence.
    """

    first: Layer
    last: Layer
    cost: Share
    accuracy: Share
    quality_loss: float
    loss_interval: tuple[float, float]


@dataclass(frozen=True, slots=True, config=STRICT)
class ReuseAccuracy:
    """Shares of exact answers: of the sender, of the receiver, and of the receiver with all KV of the sender."""

    sender: Share
    receiver: Share
    all_reused: Share


@dataclass(frozen=True, slots=True, config=STRICT)
class ReuseProfile:
    """Groups of layers with which the receiver reuses the sender's KV; `points` become costlier and better."""

    sender: str
    sender_fingerprint: Fingerprint
    receiver: str
    receiver_fingerprint: Fingerprint
    tokenizer: str  # its identity, which both share
    dtype: str
    num_layers: Annotated[int, Field(ge=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    made: str
    data_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    contexts: Annotated[int, Field(ge=1)]
    questions: Annotated[int, Field(ge=1)]
    context_tokens: Annotated[float, Field(gt=0)]  # mean
    accuracy: ReuseAccuracy
    max_quality_loss: Share
    points: Annotated[tuple[ReusePoint, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> "ReuseProfile":
        for point in self.points:
            if not point.first <= point.last < self.num_layers:
                raise ValueError(
                    f"points must be groups first <= last of layers 0..{self.num_layers - 1}, "
                    f"got {point.first}..{point.last}"
                )
            if point.quality_loss > self.max_quality_loss:
                raise ValueError(
                    f"points must lose at most max_quality_loss ({self.max_quality_loss:g}), "
                    f"got {point.quality_loss:g} for {point.first}..{point.last}"
                )
        for cheaper, better in pairwise(self.points):
            if not (cheaper.cost < better.cost and cheaper.quality_loss > better.quality_loss):
                raise ValueError(
                    "points must become costlier and better, "
                    f"got {cheaper.first}..{cheaper.last} before {better.first}..{better.last}"
                )
        if self.sender_fingerprint == self.receiver_fingerprint:
            raise ValueError(
                "sender_fingerprint and receiver_fingerprint must differ: a model reuses its own KV anyway"
            )
        return self

    @property
    def input_layers(self) -> tuple[int, ...]:
        """The layers of which the sender's hidden states are needed, in order. The first layer reads the tokens."""
        return tuple(sorted({point.first for point in self.points} - {0}))


_FILE: Final = ProfileFile("reuse profile", "moonpool-reuse-profile", 1, ReuseProfile, "moonpool droidspeak profile")


def load_reuse_profile(path: Path) -> ReuseProfile:
    """Read a profile. Raises ProfileError, which names the file, the field, the value and the expected value."""
    return _FILE.load(path)


def save_reuse_profile(profile: ReuseProfile, path: Path) -> None:
    """Write a profile; `load_reuse_profile` reads back an equal one. Raises ProfileError."""
    _FILE.save(profile, path)
