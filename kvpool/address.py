"""Who a block of KV is: chain keys, namespaces, provenance. Hashing of names only: nothing about the KV's bytes.

A block's full address is (namespace, chain key, group). The chain key says which tokens, under which tenant's salt and
tokenizer; the namespace says whose KV: weights, KvSpec, provenance. All hashing is BLAKE3 with a context per purpose:

    seed      = derive_key("…chain seed", fields(cache_salt, tokenizer_id, block_tokens))[:16]
    chain_key = derive_key("…chain key", seed)[:32]
    key_0     = keyed(chain_key, seed    || tokens_0 as int32 little-endian)[:16]
    key_i     = keyed(chain_key, key_i-1 || tokens_i as int32 little-endian)[:16]

A partial last block, of 1 to block_tokens - 1 tokens, has a key of another family, which no full block's can equal:

    tail_chain_key = derive_key("…tail key", seed)[:32]
    tail_key       = keyed(tail_chain_key, key of the last full block (or seed) || tokens as int32 little-endian)[:16]

Every key depends on all tokens before it and on the salt: without the salt no key can be computed, nor collided with
on purpose.
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
    """How KV came to be. EXACT, or any union of approximations; `a | b` is what is computed from both.

    Inheritance is the union, so nothing computed from an approximation can be EXACT again.
    """

    EXACT = 0
    QUANTISED = enum.auto()  # stored at a lower precision than it was computed in
    SIBLING = enum.auto()  # computed by a sibling model, or downstream of such KV
    SLID = enum.auto()  # computed after a window slid over sinks


def chain_seed(cache_salt: str, tokenizer_id: str, block_tokens: int) -> bytes:
    """The 16 bytes every chain of this tenant, tokenizer and block size starts from."""
    if block_tokens < 1:
        raise AddressError(f"block_tokens is {block_tokens}: must be positive")
    data = _fields(cache_salt.encode(), tokenizer_id.encode(), str(block_tokens).encode())
    return blake3(data, derive_key_context=_SEED_CONTEXT).digest(length=KEY_NBYTES)


def chain_keys(
    seed: bytes, token_ids: NDArray[np.int32], block_tokens: int, *, parent: bytes | None = None
) -> NDArray[np.uint8]:
    """Keys uint8 [n_full_blocks, 16] of the full blocks of `token_ids`; a partial tail has no key.

    With `parent` (16 bytes, the key of the block before) the chain is continued: `chain_keys(seed, a + b)` equals
    `chain_keys(seed, a)` followed by `chain_keys(seed, b, parent=last of a)` when `a` fills whole blocks.
    Raises AddressError for token arrays that are not one-dimensional integers of 32 bits.
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
    """The key (16 bytes) of a partial last block of these tokens; `parent` is the full block before it, if any.

    Equal for equal tokens from the prompt's start on under equal salts. Raises AddressError for no tokens, or as
    `chain_keys`.
    """
    _check_links(seed, parent)
    ids = _checked_ids(token_ids)
    if not len(ids):
        raise AddressError("a partial block has at least one token")
    tail_chain_key = blake3(seed, derive_key_context=_TAIL_CONTEXT).digest(length=32)
    data = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("<")).tobytes()
    return blake3((parent or seed) + data, key=tail_chain_key).digest(length=KEY_NBYTES)


def tail_keys(seed: bytes, parent: bytes | None, token_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """`tail_key` of the first 1, 2, … and all n of these tokens: uint8 [n, 16]. Raises as `chain_keys`."""
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
    """Each block's parent, uint8 [n, 16]: `parent` (zeros where None) for the first, then the chain shifted by one."""
    chain = check_chain(chain)
    first = np.frombuffer(parent or bytes(KEY_NBYTES), np.uint8).reshape(1, KEY_NBYTES)
    return np.concatenate([first, chain[:-1]]) if len(chain) else chain


def keys_u64(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The short form of keys [n, 16] for directories and policies: the first 8 bytes, little-endian, uint64 [n]."""
    halves = np.ascontiguousarray(check_chain(keys)).view(_HALF)
    return halves[:, 0].astype(np.uint64)


def keys_from_bytes(data: bytes) -> NDArray[np.uint8]:
    """The wire's concatenated keys as uint8 [n, 16]. Raises AddressError when the length is no multiple of 16."""
    _check_length(data)
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_NBYTES)


def short_keys_from_bytes(data: bytes) -> NDArray[np.uint64]:
    """The same in their short form, as `keys_u64` has it."""
    _check_length(data)
    return np.frombuffer(data, _HALF)[::2].astype(np.uint64)


def _check_length(data: bytes) -> None:
    if len(data) % KEY_NBYTES:
        raise AddressError(f"a chain of {len(data)} bytes: expected a multiple of {KEY_NBYTES}")


def check_chain(chain: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`chain` itself when it is uint8 [n, 16]; raises AddressError otherwise."""
    if chain.dtype != np.uint8 or chain.ndim != 2 or chain.shape[1] != KEY_NBYTES:
        raise AddressError(f"chain is {chain.dtype} of shape {chain.shape}: expected uint8 [n, {KEY_NBYTES}]")
    return chain


def kv_namespace(weights_fingerprint: str, spec: KvSpec, provenance: Provenance = Provenance.EXACT) -> Namespace:
    """16 bytes naming whose KV it is: equal only for equal weights, KvSpec (its dtypes included) and provenance."""
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
        raise AddressError(f"seed and parent take {KEY_NBYTES} bytes each")


def _checked_ids(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.dtype.itemsize != 4:
        raise AddressError(f"token_ids is {ids.dtype} of shape {ids.shape}: expected int32 [n]")
    return ids


def _fields(*parts: bytes) -> bytes:
    """An encoding in which no two different lists of parts are equal."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
