"""Request traces: formats, conversion, checks, statistics, sampling. No I/O beyond trace files, no network."""

from traces.dialogues import previous_turns
from traces.errors import BundledTraceDamaged, EmptySelection, TraceError, TraceFormatError, TraceNotFound
from traces.reader import CONVERSATION, load_conversation, load_trace, read_stream, read_trace
from traces.row import BLOCK_TOKENS, Trace, TraceRow
from traces.sampling import SAMPLING_SEED, family_keys, first_requests, first_seconds, sample_families
from traces.statistics import InfiniteCache, ReuseStatistics, reusable_tokens, reuse_statistics, token_hit_rate

__all__ = [
    "BLOCK_TOKENS",
    "CONVERSATION",
    "SAMPLING_SEED",
    "BundledTraceDamaged",
    "EmptySelection",
    "InfiniteCache",
    "ReuseStatistics",
    "Trace",
    "TraceError",
    "TraceFormatError",
    "TraceNotFound",
    "TraceRow",
    "family_keys",
    "first_requests",
    "first_seconds",
    "load_conversation",
    "load_trace",
    "previous_turns",
    "read_stream",
    "read_trace",
    "reusable_tokens",
    "reuse_statistics",
    "sample_families",
    "token_hit_rate",
]
