"""Whether what a request says of its blocks fits together, and what follows from it."""

from collections.abc import Sequence

from kvpool.errors import AddressError, PoolRefused, SpecError
from kvpool.policy.records import Block
from kvpool.policy.store import BlockStore
from kvpool.spec import KvSpec

__all__ = ["check_digests", "check_request", "cost_of_each", "request_blocks"]

_LEAST_S, _MOST_S = 1e-9, 1e6  # of computing; what policies make of it stays a number within these


def check_request(spec: KvSpec, chain: Sequence[bytes], parents: Sequence[bytes], num_tokens: Sequence[int]) -> None:
    """Raises AddressError when there is not one parent, or number of tokens, per block, or one is impossible."""
    if len(parents) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(parents)} parents")
    if num_tokens and len(num_tokens) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(num_tokens)} numbers of tokens")
    if any(num_tokens) and (wrong := [n for n in num_tokens if not 0 <= n < spec.block_tokens]):
        raise AddressError(
            f"a partial block of {wrong[0]} tokens: expected 1..{spec.block_tokens - 1}, 0 for a full one"
        )


def request_blocks(store: BlockStore, kv_namespace: bytes, chain: Sequence[bytes], parents: Sequence[bytes]) -> int:
    """Blocks from the prompt's first to the last of these, as far as known."""
    before = store.find(kv_namespace, parents[0]) if parents else None
    return len(chain) + (before.place.depth + 1 if before is not None else 0)


def cost_of_each(compute_s: float, num_blocks: int) -> float:
    """Seconds that computing one of the blocks took, 0 = not known. Raises PoolRefused when it cannot have been so."""
    if not 0 <= compute_s <= _MOST_S:
        raise PoolRefused(f"compute_s must be a number of seconds from 0 to {_MOST_S:.0f}, not {compute_s!r}")
    each = compute_s / max(1, num_blocks)
    return each if each >= _LEAST_S else 0.0


def check_digests(blocks: Sequence[Block], digests: Sequence[tuple[bytes, ...]]) -> None:
    """Raises SpecError when they are not those of a put's blocks, per block and group."""
    if len(digests) != len(blocks):
        raise SpecError(f"the put has {len(blocks)} new blocks, digests came for {len(digests)}")
    spec = blocks[0].spec
    want = [8 * spec.num_layers(g) for g in range(spec.num_groups)]
    for per_group in digests:
        if list(map(len, per_group)) != want:
            raise SpecError(f"digests per group take {want} bytes, came as {[len(each) for each in per_group]}")
