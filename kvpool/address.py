"""Addresses of KV blocks: chain keys, namespaces, provenance. Only identities are hashed here, never KV bytes.

A block's full address is (namespace, chain key, group). The chain key identifies its tokens, under a tenant's salt and
a tokenizer. The namespace identifies the producer: weights, KvSpec, provenance. All hashing is BLAKE3 with a context
per purpose:

    seed      = derive_key("…chain seed", fields(cache_salt, tokenizer_id, block_tokens))[:16]
    chain_key = derive_key("…chain key", seed)[:32]
    key_0     = keyed(chain_key, seed    || tokens_0 as int32 little-endian)[:16]
    key_i     = keyed(chain_key, key_i-1 || tokens_i as int32 little-endian)[:16]

The key of a partial last block (1 to block_tokens - 1 tokens) is derived differently; it never equals a full block's:

    tail_chain_key = derive_key("…tail key", seed)[:32]
    tail_key       = keyed(tail_chain_key, key of the last full block (or seed) || tokens as int32 little-endian)[:16]

Every key depends on all tokens before it and on the salt. Without the salt, keys cannot be computed and collisions
cannot be constructed.
"""

import enum

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvpool.errors import AddressError
from kvpool.spec import KvSpec

KEY_NBYTES = 16
_HALF = np.dtype("<u8")
Namespace = bytes

_SEED_CONTEXT = "moonpool v1 2026 chain seed"
_CHAIN_CONTEXT = "moonpool v1 2026 chain key"
_TAIL_CONTEXT = "moonpool v1 2026 tail key"
_NAMESPACE_CONTEXT = "moonpool v1 2026 kv namespace"


class Provenance(enum.Flag):
    """How KV was computed: EXACT, or a union of approximations; `a | b` is the provenance of KV computed from both.

    Provenance is inherited by union, so KV computed from an approximation is never EXACT.
    """

    EXACT = 0
    QUANTISED = enum.auto()  # stored at a lower precision than it was computed in
    SIBLING = enum.auto()  # computed by a sibling model, or downstream of such KV
    SLID = enum.auto()  # computed after a window slid over sinks


def chain_seed(cache_salt: str, tokenizer_id: str, block_tokens: int) -> bytes:
    """Return the 16 bytes from which all chains of this salt, tokenizer and block size start."""
    if block_tokens < 1:
        raise AddressError(f"block_tokens is {block_tokens}: must be positive")
    data = _fields(cache_salt.encode(), tokenizer_id.encode(), str(block_tokens).encode())
    return blake3(data, derive_key_context=_SEED_CONTEXT).digest(length=KEY_NBYTES)


def chain_keys(
    seed: bytes, token_ids: NDArray[np.int32], block_tokens: int, *, parent: bytes | None = None
) -> NDArray[np.uint8]:
    """Return the keys, uint8 [n_full_blocks, 16], of the full blocks of `token_ids`; a partial last block has no chain
    key.

    `parent` (16 bytes, the key of the block before) continues a chain: `chain_keys(seed, a + b)` equals
    `chain_keys(seed, a)` followed by `chain_keys(seed, b, parent=last of a)` if `a` fills whole blocks. Raises
    AddressError unless the token array is one-dimensional with 32-bit integers.
    """
    _check_links(seed, parent)
    if block_tokens < 1:
        raise AddressError(f"block_tokens is {block_tokens}: must be positive")
    ids = _checked_ids(token_ids)
    num_blocks = len(ids) // block_tokens
    data = np.ascontiguousarray(ids[: num_blocks * block_tokens], dtype=ids.dtype.newbyteorder("<")).tobytes()
    chain_key = blake3(seed, derive_key_context=_CHAIN_CONTEXT).digest(length=32)
    stride = block_tokens * 4
    keys = bytearray()
    previous = seed if parent is None else bytes(parent)
    for start in range(0, len(data), stride):
        previous = blake3(previous + data[start : start + stride], key=chain_key).digest(length=KEY_NBYTES)
        keys += previous
    return np.frombuffer(bytes(keys), np.uint8).reshape(num_blocks, KEY_NBYTES)


def tail_key(seed: bytes, parent: bytes | None, token_ids: NDArray[np.int32]) -> bytes:
    """Return the key (16 bytes) of a partial last block with these tokens.

    `parent` is the chain key of the full block before it, None if there is none.

    Equal tokens from the start of the prompt on, under equal salts, give equal keys. Raises AddressError for an empty
    token array and as `chain_keys` does.
    """
    _check_links(seed, parent)
    ids = _checked_ids(token_ids)
    if not len(ids):
        raise AddressError("a partial block has at least one token")
    tail_chain_key = blake3(seed, derive_key_context=_TAIL_CONTEXT).digest(length=32)
    data = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<")).tobytes()
    return blake3((parent or seed) + data, key=tail_chain_key).digest(length=KEY_NBYTES)


def tail_keys(seed: bytes, parent: bytes | None, token_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return `tail_key` of the first 1, 2, … n of these tokens, uint8 [n, 16]. Raises AddressError as `chain_keys`."""
    _check_links(seed, parent)
    ids = _checked_ids(token_ids)
    data = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<")).tobytes()
    hasher = blake3(parent or seed, key=blake3(seed, derive_key_context=_TAIL_CONTEXT).digest(length=32))
    keys = bytearray()
    for start in range(0, len(data), 4):
        hasher.update(data[start : start + 4])
        keys += hasher.digest(length=KEY_NBYTES)
    return np.frombuffer(bytes(keys), np.uint8).reshape(len(ids), KEY_NBYTES)


def parent_keys(chain: NDArray[np.uint8], parent: bytes | None = None) -> NDArray[np.uint8]:
    """Return the key of each block's parent, uint8 [n, 16]: `parent` (zeros if None), then the chain without its last.

    Raises AddressError as `check_chain`.
    """
    chain = check_chain(chain)
    first = np.frombuffer(parent or bytes(KEY_NBYTES), np.uint8).reshape(1, KEY_NBYTES)
    return np.concatenate([first, chain[:-1]]) if len(chain) else chain


def keys_u64(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the short form of keys [n, 16]: their first 8 bytes, little-endian, uint64 [n].

    Directories and policies use it. Raises AddressError as `check_chain`.
    """
    halves = np.ascontiguousarray(check_chain(keys)).view(_HALF)
    return halves[:, 0].astype(np.uint64)


def keys_from_bytes(data: bytes) -> NDArray[np.uint8]:
    """Return concatenated keys from the wire as uint8 [n, 16]. Raises AddressError for a partial key."""
    _check_length(data)
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_NBYTES)


def short_keys_from_bytes(data: bytes) -> NDArray[np.uint64]:
    """Return concatenated keys from the wire in short form, uint64 [n]. Raises AddressError for a partial key."""
    _check_length(data)
    return np.frombuffer(data, _HALF)[::2].astype(np.uint64)


def _check_length(data: bytes) -> None:
    if len(data) % KEY_NBYTES:
        raise AddressError(f"a chain of {len(data)} bytes: expected a multiple of {KEY_NBYTES}")


def check_chain(chain: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return `chain` if it is uint8 [n, 16]; raise AddressError otherwise."""
    if chain.dtype != np.uint8 or chain.ndim != 2 or chain.shape[1] != KEY_NBYTES:
        raise AddressError(f"chain is {chain.dtype} of shape {chain.shape}: expected uint8 [n, {KEY_NBYTES}]")
    return chain


def kv_namespace(weights_fingerprint: str, spec: KvSpec, provenance: Provenance = Provenance.EXACT) -> Namespace:
    """Return the 16-byte namespace of KV: equal only for equal weights, KvSpec (including dtypes) and provenance."""
    parts = [weights_fingerprint.encode(), str(spec.block_tokens).encode()]
    for group in spec.groups:
        layers = ",".join(map(str, group.layers))
        fields: tuple[str | int, ...] = (
            *(group.kind, group.window, layers, group.kv_heads, group.head_dim, group.dtype),
            *((group.scale_group,) if group.scale_group else ()),
        )
        parts.append(_fields(*(str(field).encode() for field in fields)))
    approximations = sorted(str(flag.name) for flag in provenance)
    parts.append("+".join(approximations).encode())
    return blake3(_fields(*parts), derive_key_context=_NAMESPACE_CONTEXT).digest(length=KEY_NBYTES)


def _check_links(seed: bytes, parent: bytes | None) -> None:
    if len(seed) != KEY_NBYTES or (parent is not None and len(parent) != KEY_NBYTES):
        raise AddressError(f"seed and parent must have {KEY_NBYTES} bytes each")


def _checked_ids(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.dtype.itemsize != 4:
        raise AddressError(f"token_ids is {ids.dtype} of shape {ids.shape}: expected int32 [n]")
    return ids


def _fields(*parts: bytes) -> bytes:
    """Encode a list of byte strings so that different lists never have equal encodings."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
