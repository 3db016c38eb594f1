"""Current state and recent history of one conductor as JSON, for the console. Stateless."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from conductor.core import Core
from conductor.policy import history
from conductor.policy.events import NS
from conductor.policy.history import JudgedRequest, RefusedRequest, SessionTurns
from conductor.policy.objectives import objective_text
from conductor.registry import Registry
from conductor.slo import SloKeeper

__all__ = ["overview", "request_to_json"]

_NEWEST: Final = 60  # requests
_SESSIONS: Final = 30
_TURNS: Final = 12  # of a session
_MOST_ACCOUNTS: Final = 200  # models times tenants
_HOTTEST: Final = 10  # prefixes
_MOST_OBJECTIVES: Final = 200  # models times classes


def overview(
    core: Core, registry: Registry, slo: SloKeeper, first_slice: int, *, clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Return the console's data that is not in the reply to `Cluster`. Takes about a millisecond.

    `first_slice`: number of the first traffic slice to include.
    """
    policy, now_ns, now_s = core.policy, core.now_ns(), clock()
    past, config = policy.history, policy.config
    members = {member.node.node_id: member for member in registry}
    version = slo.history[-1] if slo.history else None
    return {
        "at_s": now_s,
        "admission": config.admission,
        "mode": config.admission_mode,
        "has_decision_log": core.log is not None,
        "slo": {
            **slo.state(),
            "author": version.author if version else "",
            "reason": version.reason if version else "",
            "at_s": version.at_s if version else 0.0,
            "content": json.loads(version.content) if version else {},
        },
        "objectives": list(_objectives(core)),
        "workers": {
            node.node_id: {
                "queue_s": queue_s,
                "committed_tokens": committed_tokens,
                "is_leaving": node.node_id in members and members[node.node_id].is_leaving,
                "is_to_switch": node.node_id in members and members[node.node_id].is_to_switch,
            }
            for node, queue_s, committed_tokens in policy.loads_of_nodes()
        },
        "slice_s": history.SLICE_NS / NS,
        "slices": [
            {
                "number": one.number,
                "at_s": now_s - (now_ns - one.start_ns) / NS,
                "flows": {model: history.traffic_to_plain(flow) for model, flow in one.flows.items()},
            }
            for one in past.traffic.slices()
            if one.number >= first_slice
        ],
        "requests": [request_to_json(request, now_ns, now_s) for request in past.newest(_NEWEST)],
        "refused": [_refused_to_json(request, now_ns, now_s) for request in past.refused()],
        "decided": past.num_decided,
        "remembered": len(past),
        "sessions": [_session_to_json(session, now_ns, now_s) for session in past.sessions(_SESSIONS)],
        "tenants": list(_tenants(core)),
        "hottest": [
            {"key": f"{hot.key & (1 << 64) - 1:016x}", "uses": hot.uses, "blocks": hot.blocks}
            for hot in past.hottest(_HOTTEST)
        ],
    }


def request_to_json(request: JudgedRequest, now_ns: int, now_s: float) -> dict[str, Any]:
    """Convert a past request to JSON. Marks are in seconds after its arrival; unknown values are None."""
    wanted = request.objectives
    return {
        "request_id": request.request_id,
        "at_s": now_s - (now_ns - request.at_ns) / NS,
        "model": request.model,
        "tenant": request.tenant,
        "slo_class": wanted.slo_class,
        "prompt_tokens": request.prompt_tokens,
        "outcome": request.outcome,
        "reason": request.rejection or request.lost_to,
        "unwanted": request.unwanted,
        "prefill": request.prefill,
        "decode": request.decode,
        "attempts": request.attempts,
        "reused_tokens": request.reused_tokens,
        "predicted_ttft_s": request.forecast.ttft_s,
        "predicted_wait_s": request.forecast.waited_s,
        "predicted_tbt_s": request.predicted_tbt_s,
        "ttft_objective_s": wanted.ttft_s,
        "tbt_objective_s": wanted.tbt_s,
        "ttft_from": wanted.ttft_from,
        "tbt_from": wanted.tbt_from,
        "ttft_s": request.ttft_s or None,
        "tbt_s": request.tbt_s or None,
        "generated": request.generated,
        "cached_tokens": request.cached_tokens,
        "session": _hash_text(request.session),
        "ended_after_s": (request.ended_ns - request.at_ns) / NS if request.ended_ns else None,
        "marks": [
            {"phase": mark.phase, "node": mark.node_id, "after_s": (mark.at_ns - request.at_ns) / NS}
            for mark in request.marks
        ],
    }


def _refused_to_json(request: RefusedRequest, now_ns: int, now_s: float) -> dict[str, Any]:
    """Convert a request without predictions to JSON, with the fields of `request_to_json` that it has."""
    return {
        "request_id": request.request_id,
        "at_s": now_s - (now_ns - request.at_ns) / NS,
        "model": request.model,
        "tenant": request.tenant,
        "slo_class": request.slo_class,
        "prompt_tokens": request.prompt_tokens,
        "outcome": "rejected",
        "reason": request.reason,
    }


def _session_to_json(session: SessionTurns, now_ns: int, now_s: float) -> dict[str, Any]:
    """Convert a session's latest turns to JSON, oldest first. Ids are hexadecimal; "" is none."""
    turns = list(session.requests.values())
    last = turns[-1]
    return {
        "session": _hash_text(session.session),
        "parent": _hash_text(last.parent_session),
        "tenant": last.tenant,
        "first_at_s": now_s - (now_ns - session.first_ns) / NS,
        "num_turns": session.num_turns,
        "turns": [
            {
                "request_id": turn.request_id,
                "at_s": now_s - (now_ns - turn.at_ns) / NS,
                "model": turn.model,
                "outcome": turn.outcome,
                "reason": turn.rejection or turn.lost_to,
                "prefill": turn.prefill,
                "prompt_tokens": turn.prompt_tokens,
                "reused_tokens": turn.cached_tokens if turn.outcome == "finished" else turn.reused_tokens,
                "generated": turn.generated,
                "ttft_s": turn.ttft_s or None,
                "ended_after_s": (turn.ended_ns - turn.at_ns) / NS if turn.ended_ns else None,
                "pause_s": turn.pause_s,
                "lifetime_s": turn.lifetime_s,
            }
            for turn in turns[-_TURNS:]
        ],
    }


def _tenants(core: Core) -> Iterator[dict[str, Any]]:
    """Yield usage per model and tenant; `account` identifies the tenant in the answers of pool nodes."""
    for model, account, live in islice(core.policy.tenants(), _MOST_ACCOUNTS):
        yield {
            "model": model,
            "tenant": account.name,
            "account": account.token,
            "requests": live,
            "computed_tokens": account.used.uncached_tokens,
            "reused_tokens": account.used.cached_tokens,
            "generated_tokens": account.used.generated_tokens,
            "kv_block_s": account.used.kv_block_s,
        }


def _hash_text(number: int) -> str:
    """Return a 64-bit hash in hexadecimal, or "" for 0: JavaScript's numbers have too few digits."""
    return f"{number:016x}" if number else ""


def _objectives(core: Core) -> Iterator[dict[str, Any]]:
    """Yield the objectives in force, by model and class."""
    book, count = core.policy.slo, 0
    for model in core.policy.models():
        for slo_class in ["", *sorted(book.record.classes)]:
            resolved = book.resolve(model, "", slo_class)
            if slo_class == "" and resolved.slo_class:
                continue  # requests without a class belong to the default class
            yield {
                "model": model,
                "slo_class": resolved.slo_class,
                "is_default": resolved.slo_class == book.record.default_class,
                "ttft": objective_text(resolved.ttft),
                "tbt": objective_text(resolved.tbt),
                "ttft_from": resolved.ttft_from,
                "tbt_from": resolved.tbt_from,
            }
            count += 1
            if count >= _MOST_OBJECTIVES:
                return
