"""What the blocks of one namespace have in common: their spec, the sizes of their slots, whose place they may take."""

from collections import Counter
from collections.abc import Mapping

from kvpool.errors import SpecError, SpecMismatch
from kvpool.policy.records import Family
from kvpool.policy.room import TierRoom
from kvpool.spec import KvSpec

__all__ = ["Families"]

_MAX_UNUSED = 16  # without blocks now; what their policies have learnt is kept


class Families:
    """By namespace. One that has no blocks any more may come back with another spec."""

    def __init__(self, dram: TierRoom, ssd: TierRoom, quotas: Mapping[bytes, int]) -> None:
        self._dram = dram
        self._ssd = ssd
        self._quotas = quotas
        self._families: dict[bytes, Family] = {}

    @property
    def num_blocks(self) -> Counter[bytes]:
        """Blocks here, in whatever tier, per namespace."""
        return Counter({f.kv_namespace: f.num_blocks for f in self._families.values() if f.num_blocks})

    def of(self, kv_namespace: bytes, spec: KvSpec) -> Family:
        """What the namespace's blocks have in common.

        Raises SpecMismatch when it has another spec here, SpecError when no slot could ever fit.
        """
        known = self._families.get(kv_namespace)
        if known is not None and (known.spec is spec or known.spec == spec):
            return known
        if known is not None and known.num_copies:
            raise SpecMismatch(f"namespace {kv_namespace.hex()} holds blocks of {known.spec}, not of {spec}")
        for g in range(spec.num_groups):
            if not self._dram.slabs.fits(spec.slot_nbytes(g)):
                raise SpecError(f"a slot of group {g} takes {spec.slot_nbytes(g)} bytes: the arena is too small for it")
        slots = tuple(self._dram.slabs.slot_nbytes(spec.slot_nbytes(g)) for g in range(spec.num_groups))
        extent = (self._ssd.slabs.slot_nbytes(spec.block_nbytes),)
        quota_nbytes = self._quotas.get(kv_namespace)
        partitions = (
            self._dram.partition(b"" if quota_nbytes is None else kv_namespace, slots),
            self._ssd.partition(b"", extent),
        )
        unused = [family for family in self._families.values() if not family.num_copies]
        for family in [*unused[:-_MAX_UNUSED], *([] if known is None else [known])]:
            if self._families.pop(family.kv_namespace, None) is not None:
                for room, partition in zip((self._dram, self._ssd), family.partitions, strict=True):
                    room.forget(partition)
        made = Family(kv_namespace, spec, (slots, extent), (sum(slots), sum(extent)), partitions, (quota_nbytes, None))
        self._families[kv_namespace] = made
        return made

    def spec_of(self, kv_namespace: bytes) -> KvSpec | None:
        """The spec of a namespace that has blocks here."""
        family = self._families.get(kv_namespace)
        return family.spec if family is not None and family.num_copies else None
