"""Composition of a model's KV cache, and the bytes of each part. Sizes and layout only, no addresses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvpool.errors import SpecError
from moonpool_proto.v1 import common_pb2

DTYPE_NBYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
TOKEN_RANGE = np.dtype([("start", "<i8"), ("stop", "<i8")])
"""Token range of a block, start inclusive and stop exclusive, as the compiled digests take it."""
GROUP_LAYOUT = np.dtype(
    [
        ("block_tokens", "<i8"),
        ("num_layers", "<i8"),
        ("layer_nbytes", "<i8"),  # of one layer of a slot
        ("num_runs", "<i8"),  # runs of token rows in a layer: heads x 2 (K and V)
        ("row_nbytes", "<i8"),  # of one token row
    ]
)
"""Layout of one group's slots, as the compiled copies take it."""
# Offsets of words within a layer's slot must fit 32 bits: the digest mixes them into the upper half of a word.
MAX_LAYER_NBYTES = 1 << 32


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV has the same layout. `kind` is "full" or "window"; `window` is in tokens, 0 for full attention.

    `kind` "hidden" is no KV but the hidden state that enters each layer: its first half in place of K, its second half
    in place of V, `head_dim` values each, with one head.

    A row is one token's K, or V, in one head of one layer. If `scale_group` > 0, every `scale_group` values of a row
    share a float16 scale, and a row is its values followed by its scales. Raises SpecError for invalid values.
    """

    kind: str
    window: int
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    scale_group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(layer) for layer in self.layers))
        if self.kind not in ("full", "window", "hidden"):
            raise SpecError(f"KvGroup.kind is {self.kind!r}: expected 'full', 'window' or 'hidden'")
        if (self.kind == "window") != (self.window > 0):
            raise SpecError(f"KvGroup of kind {self.kind!r} has window {self.window}: positive for window, else 0")
        if self.kind == "hidden" and (self.kv_heads != 1 or self.scale_group):
            raise SpecError(
                f"KvGroup of kind 'hidden' has kv_heads {self.kv_heads} and scale_group {self.scale_group}: "
                "expected 1 and 0"
            )
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) != len(self.layers):
            raise SpecError(f"KvGroup.layers is {self.layers}: expected distinct layer numbers, at least one")
        if self.kv_heads < 1 or self.head_dim < 1:
            raise SpecError(f"KvGroup has kv_heads {self.kv_heads} and head_dim {self.head_dim}: both must be positive")
        if self.dtype not in DTYPE_NBYTES:
            raise SpecError(f"KvGroup.dtype is {self.dtype!r}: expected one of {', '.join(DTYPE_NBYTES)}")
        if self.scale_group < 0 or (self.scale_group and self.head_dim % self.scale_group):
            raise SpecError(
                f"KvGroup.scale_group is {self.scale_group}: expected a divisor of head_dim {self.head_dim}"
            )

    @cached_property
    def token_row_nbytes(self) -> int:
        """Bytes of one token's K, or V, in one head of one layer, its scales included."""
        scales = self.head_dim // self.scale_group if self.scale_group else 0
        return self.head_dim * DTYPE_NBYTES[self.dtype] + scales * DTYPE_NBYTES["float16"]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in the whole group: K and V, all heads, all layers."""
        return len(self.layers) * self.kv_heads * 2 * self.token_row_nbytes


@dataclass(frozen=True)
class KvSpec:
    """The groups of a model's KV, and the tokens per block. Group arguments `g` are indices into `groups`.

    Raises SpecError for invalid values.
    """

    groups: tuple[KvGroup, ...]
    block_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise SpecError("KvSpec has no groups")
        if self.block_tokens < 1:
            raise SpecError(f"KvSpec.block_tokens is {self.block_tokens}: must be positive")
        layers = [layer for group in self.groups for layer in group.layers]
        if len(set(layers)) != len(layers):
            raise SpecError(f"KvSpec has a layer in two groups: {[group.layers for group in self.groups]}")
        for g in range(len(self.groups)):
            if self.layer_nbytes(g) >= MAX_LAYER_NBYTES:
                raise SpecError(
                    f"KvSpec group {g}: a layer of a block takes {self.layer_nbytes(g)} bytes, 4 GiB or more"
                )

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def num_layers(self, g: int) -> int:
        """Return the number of layers in group `g`."""
        return len(self.groups[g].layers)

    def token_row_nbytes(self, g: int) -> int:
        """Return the bytes of one token's K, or V, in one head of one layer of group `g`."""
        return self.groups[g].token_row_nbytes

    def layer_nbytes(self, g: int) -> int:
        """Return the bytes of one layer of one block of group `g`."""
        group = self.groups[g]
        return group.kv_heads * 2 * self.block_tokens * group.token_row_nbytes

    def slot_nbytes(self, g: int) -> int:
        """Return the bytes of one block of group `g`: all its layers."""
        return self.num_layers(g) * self.layer_nbytes(g)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Groups of which a block is needed only near the end of the sequence: those with a window."""
        return tuple(g for g, group in enumerate(self.groups) if group.window)

    @cached_property
    def lasting(self) -> tuple[int, ...]:
        """All other groups; empty if all layers have windows."""
        return tuple(g for g in range(self.num_groups) if g not in self.windowed)

    @property
    def window_blocks(self) -> int:
        """Blocks before a block that its first token may see in the windowed groups; 0 without any."""
        longest = max((self.groups[g].window for g in self.windowed), default=1)
        return -(-(longest - 1) // self.block_tokens)

    def layers_of(self, groups: Sequence[int]) -> list[int]:
        """Return the layers of these groups."""
        return [layer for g in groups for layer in self.groups[g].layers]

    def part(self, groups: Sequence[int]) -> "KvSpec":
        """Return the spec of these groups, at least one, alone; itself if they are all."""
        if tuple(groups) == tuple(range(self.num_groups)):
            return self
        return KvSpec(tuple(self.groups[g] for g in groups), self.block_tokens)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all groups."""
        return sum(self.slot_nbytes(g) for g in range(self.num_groups))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one token over all groups."""
        return sum(group.token_nbytes for group in self.groups)

    def to_proto(self) -> common_pb2.KvSpec:
        return common_pb2.KvSpec(
            groups=[_group_to_proto(group) for group in self.groups], block_tokens=self.block_tokens
        )

    @classmethod
    def from_proto(cls, message: common_pb2.KvSpec) -> "KvSpec":
        """Decode a spec. Raises SpecError if the message does not describe a valid one."""
        return cls(_groups_from_proto(message.groups), message.block_tokens)

    def to_json(self) -> dict[str, object]:
        """Return the spec as JSON-compatible data, for State replies; `from_json` decodes it."""
        groups = [
            {
                "kind": group.kind,
                "window": group.window,
                "layers": list(group.layers),
                "kv_heads": group.kv_heads,
                "head_dim": group.head_dim,
                "dtype": group.dtype,
                **({"scale_group": group.scale_group} if group.scale_group else {}),
            }
            for group in self.groups
        ]
        return {"groups": groups, "block_tokens": self.block_tokens}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> "KvSpec":
        """Decode the result of `to_json`. Raises SpecError for anything else."""
        try:
            groups = data["groups"]
            if not isinstance(groups, list):
                raise TypeError(f"groups is a {type(groups).__name__}")
            block_tokens = int(str(data["block_tokens"]))
            if any(type(group[name]) is not int for group in groups for name in ("window", "kv_heads", "head_dim")):
                raise TypeError("window, kv_heads and head_dim must be integers")
            return cls(tuple(KvGroup(**{**group, "layers": tuple(group["layers"])}) for group in groups), block_tokens)
        except SpecError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecError(f"not a KvSpec: {error!r}") from error


def _group_to_proto(group: KvGroup) -> common_pb2.KvGroup:
    return common_pb2.KvGroup(
        kind=group.kind,
        window=group.window,
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        scale_group=group.scale_group,
    )


def _groups_from_proto(groups: Sequence[common_pb2.KvGroup]) -> tuple[KvGroup, ...]:
    return tuple(
        KvGroup(g.kind, g.window, tuple(g.layers), g.kv_heads, g.head_dim, g.dtype, g.scale_group) for g in groups
    )
