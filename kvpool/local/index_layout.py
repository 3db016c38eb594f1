"""Layout of the shared index in memory, and its synchronisation (a seqlock per entry). Constants only.

The index is an array of little-endian uint64 words, written by the pool node alone:

    [0, 8)          header, with the fields AT_... below
    [64, 64 + b)    b = 2**k buckets: 0 (empty) or tag << 32 | entry + 1; linear probing from hash & (b - 1)
    then            entries of `entry_words` words each: version, namespace (2), chain key (2), shape, offsets of the
                    groups, digests of all groups' layers

The hash is the first word of the namespace xor that of the chain key (both are BLAKE3 output), the tag its upper half.

    writer (one thread)                          reader (any process, no lock)
    version += 1 (odd), release fence            read the version (acquire); odd: retry, then a miss
    write the entry's fields                     read the fields, copy the slots
    version += 1 (even), store-release           acquire fence; the version must be the same, else a miss

Versions never repeat, so a version is also the entry's generation: the pool node voids the entry before it reuses the
slots, and an unchanged version proves that the copied bytes were the block's. AT_BUCKETS_VERSION protects the buckets
in the same way: it is odd while a removal moves them, and a failed search is repeated if it changed. A full index is
replaced by a larger one and set to MOVED; readers then map the new one. At the end it is set to CLOSED.
"""

MAGIC, FORMAT = 0x58444E494C4F4F50, 1  # "POOLINDX"

HEADER_WORDS = 64
AT_MAGIC, AT_FORMAT, AT_INCARNATION, AT_STATE, AT_BUCKETS, AT_ENTRIES, AT_ENTRY_WORDS, AT_BUCKETS_VERSION = range(8)

FOUND, MISSING, CORRUPT, STALE = 0, 1, 2, 3  # reasons for which a look-up or get ended

LIVE, MOVED, CLOSED = 0, 1, 2  # AT_STATE: in use; replaced by a larger index; the pool node has stopped

# Offsets of fields within an entry, in words.
ENTRY_VERSION, ENTRY_KEY, ENTRY_SHAPE, ENTRY_OFFSETS = 0, 1, 5, 6
# Shape: num_tokens << 32 | groups << 16 | layers over all groups.
SHAPE_TOKENS_SHIFT, SHAPE_GROUPS_SHIFT = 32, 16


def index_words(num_buckets: int, num_entries: int, entry_words: int) -> int:
    """Return the number of words of an index."""
    return HEADER_WORDS + num_buckets + num_entries * entry_words


def entry_words(num_groups: int, num_layers: int) -> int:
    """Return the number of words of an entry, rounded up to whole cache lines."""
    return -(-(ENTRY_OFFSETS + num_groups + num_layers) // 8) * 8
