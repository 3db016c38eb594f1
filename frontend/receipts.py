"""Receipts: what an answer's decisions promised and what was measured, as `moonpool decisions verify` reads it."""

import re
from typing import Any, Final, Protocol

from frontend.request import AttemptRecord, GenerationRequest, RequestStats
from moonpool_proto.v1 import conductor_pb2, worker_pb2

__all__ = ["KvCounts", "decision_id", "kv_of", "parse_decision_id", "receipt_of", "record_kv"]

RECEIPT_VERSION: Final = 1
_ID: Final = re.compile(r"([1-9a-f][0-9a-f]{0,15})-([1-9][0-9]{0,18})", re.ASCII)


def decision_id(run: int, number: int) -> str:
    """Return a decision's id: the run of its conductor in hexadecimal, and the number of the event in the run."""
    return f"{run:x}-{number}"


def parse_decision_id(text: str) -> tuple[int, int]:
    """Return the (run, number) of a decision's id. Raises ValueError."""
    found = _ID.fullmatch(text)
    if found is None:
        raise ValueError(f"a decision's id must be RUN-NUMBER, such as 187a2b3c4d5e6f70-42, got {text[:80]!r}")
    return int(found[1], 16), int(found[2])


def record_kv(record: AttemptRecord, timing: worker_pb2.Timing) -> None:
    """Record the sources of an attempt's KV from a worker's timing, of its first token or of its hand-off."""
    if not timing.HasField("handoff"):
        record.kv = conductor_pb2.KvSources(
            cached_tokens=timing.cached_tokens,
            cached_dram_tokens=timing.cached_dram_tokens,
            cached_ssd_tokens=timing.cached_ssd_tokens,
            cached_remote_tokens=timing.cached_remote_tokens,
            recomputed_blocks=timing.recomputed_blocks,
            sibling_tokens=timing.sibling_tokens,
        )
    elif record.kv is not None:
        record.kv.recomputed_blocks += timing.recomputed_blocks


def receipt_of(request: GenerationRequest, stats: RequestStats, ttft_s: float) -> dict[str, Any]:
    """Return a finished answer's receipt as JSON data; `ttft_s` as reported to the conductor."""
    last = len(stats.placements) - 1
    attempts = [
        _attempt(number, record, len(request.prompt_ids), is_last=number == last)
        for number, record in enumerate(stats.placements)
    ]
    return {
        "version": RECEIPT_VERSION,
        "request_id": request.request_id,
        "model": request.model,
        "prompt_tokens": len(request.prompt_ids),
        "generated_tokens": len(stats.token_ids),
        "ttft_s": ttft_s,
        "tbt_s": stats.mean_tbt_s,
        "attempts": attempts,
    }


def _attempt(number: int, record: AttemptRecord, prompt_tokens: int, *, is_last: bool) -> dict[str, Any]:
    placement = record.placement
    decision = placement.decision if placement.HasField("decision") else None
    decoding = placement.decode if placement.HasField("decode") else placement.prefill
    return {
        "attempt": number,
        "decision": None if decision is None else decision_id(decision.run, decision.number),
        "objectives_version": placement.slo_version,
        "prefill_node": placement.prefill.node_id,
        "decode_node": decoding.node_id,
        "helpers": [helper.node_id for helper in placement.helpers],
        "reuse_blocks": placement.reuse_blocks,
        "predicted_ttft_s": placement.predicted_ttft_s,
        "predicted_tbt_s": placement.predicted_tbt_s,
        "tokens_before": record.tokens_before,
        "outcome": "finished" if is_last else "retry",
        "kv": None if record.kv is None else kv_of(record.kv, prompt_tokens + record.tokens_before),
    }


class KvCounts(Protocol):
    """Reused tokens of a prompt by tier: a `KvSources`, of the protocol or of the conductor's events."""

    @property
    def cached_tokens(self) -> int: ...
    @property
    def cached_dram_tokens(self) -> int: ...
    @property
    def cached_ssd_tokens(self) -> int: ...
    @property
    def cached_remote_tokens(self) -> int: ...
    @property
    def recomputed_blocks(self) -> int: ...
    @property
    def sibling_tokens(self) -> int: ...


def kv_of(kv: KvCounts, prompt_tokens: int) -> dict[str, int]:
    """Return a receipt's account of the KV of a prompt of `prompt_tokens`, generated tokens included."""
    pooled = kv.cached_dram_tokens + kv.cached_ssd_tokens + kv.cached_remote_tokens
    return {
        "computed_tokens": max(0, prompt_tokens - kv.cached_tokens - kv.sibling_tokens),
        "cached_own_tokens": max(0, kv.cached_tokens - pooled),
        "cached_dram_tokens": kv.cached_dram_tokens,
        "cached_ssd_tokens": kv.cached_ssd_tokens,
        "cached_remote_tokens": kv.cached_remote_tokens,
        "recomputed_blocks": kv.recomputed_blocks,
        "sibling_tokens": kv.sibling_tokens,
    }
