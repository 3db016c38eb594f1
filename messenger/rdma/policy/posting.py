"""Parameters of `Rails`, and the instructions that it returns."""

from dataclasses import dataclass
from typing import NamedTuple

from messenger.rdma.policy.batch_split import CUT_NBYTES
from messenger.slices import Rows
from rpc.errors import InvalidArgument


@dataclass(frozen=True)
class RailSpec:
    """A rail as configured: its nominal speed, and whether it is used only when no other works."""

    name: str
    speed_gbit: float
    is_spare: bool = False


@dataclass(frozen=True)
class Limits:
    """Bounds on posted work. Raises InvalidArgument for invalid values.

    `least_share_nbytes` is the least number of bytes per rail when a batch is spread. `window_nbytes` and `window_rows`
    limit the bytes and slices in flight on one rail, `post_nbytes` and `post_rows` those of one Post, which has one
    completion.
    """

    least_share_nbytes: int = 256 << 10
    window_nbytes: int = 16 << 20
    window_rows: int = 4096
    post_nbytes: int = 4 << 20
    post_rows: int = 1024

    def __post_init__(self) -> None:
        sizes_fit = CUT_NBYTES <= self.least_share_nbytes <= self.post_nbytes <= self.window_nbytes
        if not sizes_fit or not 1 <= self.post_rows <= self.window_rows:
            raise InvalidArgument(f"limits must grow from {CUT_NBYTES} bytes over share and post to window, got {self}")


class Post(NamedTuple):
    """Instruction: post these slices on the rail, the last one signalled, and report `completed(number)`."""

    number: int
    batch: int
    rail: int
    rows: Rows
    nbytes: int
    posted_ns: int


class Announce(NamedTuple):
    """Instruction: send the batch's frame on the rail, after everything posted there; report `completed(number)`."""

    number: int
    batch: int
    rail: int


Instruction = Post | Announce
