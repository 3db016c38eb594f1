"""A pool's two tiers without a pool node: what tests put there, read, and find where."""

from kvpool import KvGroup, KvSpec
from kvpool.events import Tier
from kvpool.policy import Block, LoadOutcome, PoolCore, PoolLimits, PutRequest, SlotStatus

NEW, EXISTS, NO_SPACE = SlotStatus.NEW, SlotStatus.EXISTS, SlotStatus.NO_SPACE
SPEC = KvSpec((KvGroup("full", 0, (0,), 4, 32, "float32"), KvGroup("window", 4, (1, 2), 4, 32, "float16")), 2)
WIDE = KvSpec((KvGroup("full", 0, tuple(range(8)), 4, 32, "float32"),), 2)
NS, WIDE_NS = b"n" * 16, b"w" * 16
ROOT = bytes(16)
MS = 1_000_000


def keys(n: int, salt: int = 0) -> list[bytes]:
    return [bytes([salt]) + i.to_bytes(15, "big") for i in range(1, n + 1)]


class Pool:
    """A core with room for some blocks of 4096 bytes in each tier, and short hands for its calls."""

    def __init__(self, room: int, ssd_room: int = 0, *, write_above: float = 1.0, **limits: object) -> None:
        self.core = PoolCore(
            PoolLimits(
                room * 4096,
                2048,
                operation_ns=30 * MS,
                max_lease_ns=10**12,
                ssd_nbytes=ssd_room * 4096,
                ssd_slab_nbytes=4096,
                write_above=write_above,
                **limits,  # type: ignore[arg-type]
            ),
            incarnation=1,
        )
        self.now = 0

    def put(self, chain: list[bytes], parent: bytes = ROOT, ns: bytes = NS, *, tail: bool = False) -> list[SlotStatus]:
        """Store blocks; with `tail` the last one is partial."""
        self.now += MS
        spec = WIDE if ns == WIDE_NS else SPEC
        num_tokens = [0] * (len(chain) - 1) + [1] if tail else []
        request = PutRequest(ns, spec, chain, [parent, *chain[:-1]], num_tokens, float(len(chain)))
        got = self.core.allocate(self.now, request, owner="w", owner_incarnation=1, ttl_ns=MS)
        if got.put_id:
            digests = tuple(bytes(8 * spec.num_layers(g)) for g in range(spec.num_groups))
            self.core.seal(self.now, got.put_id, [digests] * len(got.new_blocks))
            self.core.fence_revoked(got.put_id)
        return list(got.status)

    def pin(self, chain: list[bytes], ns: bytes = NS, *, tails: bool = False):
        self.now += MS
        return self.core.pin(self.now, ns, chain, owner="w", owner_incarnation=1, lease_ns=10 * MS, tails=tails)

    def use(self, chain: list[bytes], ns: bytes = NS) -> int:
        grant = self.pin(chain, ns)
        return len(grant.blocks) if grant and self.core.unpin(grant.lease_id) else 0

    def write_back(self, max_blocks: int = 100, *, everything: bool = False) -> list[Block]:
        writes = self.core.writes(self.now, max_blocks * 4096, everything=everything)
        for write in writes:
            self.core.written(self.now, write, True)
        return [write.block for write in writes]

    def load(self, chain: list[bytes], outcome: LoadOutcome = LoadOutcome.OK) -> int:
        loads = self.core.load(self.now, NS, chain)
        for load in loads:
            self.core.loaded(self.now, load, outcome)
        return len(loads)

    def where(self, chain: list[bytes], ns: bytes = NS) -> str:
        """Per block: d in DRAM, s on SSD, b both, - neither."""
        found = [self.core.store.find(ns, chain_key) for chain_key in chain]
        return "".join("-dsb"[bool(b and b.offsets) + 2 * (b is not None and b.ssd_offset is not None)] for b in found)

    def told(self) -> dict[bytes, Tier]:
        """State of a reader of the events."""
        told: dict[bytes, Tier] = {}
        for message in self.core.log.after(1, 0) or []:
            for run in message.removed:
                for i in range(0, len(run.chain), 16):
                    told.pop(run.chain[i : i + 16])
            for run in message.stored:
                told |= {run.chain[i : i + 16]: run.tier for i in range(0, len(run.chain), 16)}
        return told

    def on_ssd_only(self, chain: list[bytes]) -> None:
        self.put(chain)
        self.write_back(everything=True)
        self.core.flush(self.now, NS, dram_only=True)
        assert self.where(chain) == "s" * len(chain)
