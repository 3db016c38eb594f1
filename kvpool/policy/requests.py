"""Whether what a request says of its blocks fits together, and what follows from it."""

from collections.abc import Sequence

from kvpool.errors import AddressError, SpecError
from kvpool.policy.records import Block
from kvpool.policy.store import BlockStore
from kvpool.spec import KvSpec

__all__ = ["check_digests", "check_request", "request_blocks"]


def check_request(spec: KvSpec, chain: Sequence[bytes], parents: Sequence[bytes], num_tokens: Sequence[int]) -> None:
    """Raises AddressError when there is not one parent, or number of tokens, per block, or one is impossible."""
    if len(parents) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(parents)} parents")
    if num_tokens and len(num_tokens) != len(chain):
        raise AddressError(f"{len(chain)} blocks with {len(num_tokens)} numbers of tokens")
    if wrong := [n for n in num_tokens if not 0 <= n < spec.block_tokens]:
        raise AddressError(
            f"a partial block of {wrong[0]} tokens: expected 1..{spec.block_tokens - 1}, 0 for a full one"
        )


def request_blocks(store: BlockStore, kv_namespace: bytes, chain: Sequence[bytes], parents: Sequence[bytes]) -> int:
    """Blocks from the prompt's first to the last of these, as far as known."""
    before = store.find(kv_namespace, parents[0]) if parents else None
    return len(chain) + (before.place.depth + 1 if before is not None else 0)


def check_digests(blocks: Sequence[Block], digests: Sequence[tuple[bytes, ...]]) -> None:
    """Raises SpecError when they are not those of a put's blocks, per block and group."""
    if len(digests) != len(blocks):
        raise SpecError(f"the put has {len(blocks)} new blocks, digests came for {len(digests)}")
    spec = blocks[0].spec
    want = [8 * spec.num_layers(g) for g in range(spec.num_groups)]
    for per_group in digests:
        if list(map(len, per_group)) != want:
            raise SpecError(f"digests per group take {want} bytes, came as {[len(each) for each in per_group]}")
