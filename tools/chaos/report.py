"""Report of a run: JSON, and one page with a timeline of faults and requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tools.chaos.faults import Injected
from tools.chaos.requests import ClientRequest
from tools.chaos.schedule import FaultKind
from tools.chaos.verify import Verdict

NOT_INJECTED = {
    "kills and pauses of Redis": "it is no part of the cluster; conductors go on without it, as when the link is cut",
    "a disk that lies about a sync, or loses writes at power loss": "no device mapper here; tests/kvpool/ssd covers it",
    "delayed, reordered or lost single packets": "the kernel has no netem; links are cut as a whole",
    "cuts of shared memory between processes of one host": "it has no packets; kills and pauses cover it",
    "a wall clock of the whole machine": "other processes of the machine use it; each process gets its own",
}
DEFINITIONS = {
    "lost": "no complete answer within 150 s in spite of retries, an attempt from which nothing came for 45 s, or a "
    "status that a client does not retry",
    "retried": "requests with more than one attempt: refused or broken connections, ends without a finish reason, "
    "named errors",
    "broken_by_frontend_kill": "attempts whose connection broke while their frontend was killed or cut off; the retry "
    "must succeed",
    "wrong_tokens": "tokens that teacher forcing or the paced engine's rule does not give, in broken answers too",
    "wrong_answers": "wrong structure, finish reason or usage",
    "leaks": "roles that hold something 60 s after the last request, growth of descriptors or threads, shared memory "
    "segments left after the end",
}


@dataclass
class Outcome:
    """All that a run found."""

    seconds: float
    seed: int
    faults: dict[str, int]
    history: list[Injected]
    requests: list[ClientRequest]
    verdict: Verdict
    leaks: list[str]
    unexpected: list[str]  # exits, slow recoveries, internal errors
    unsupported: dict[str, str]
    broken_by_frontend_kill: int
    broken_unexplained: int
    rest_s: float
    began_s: float  # of `time.monotonic`
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """True if the run found no defect."""
        verdict = self.verdict
        return not (verdict.lost or verdict.wrong_tokens or verdict.wrong_answers or self.leaks or self.unexpected)

    def as_json(self) -> dict[str, Any]:
        """Return the report's content."""
        verdict = self.verdict
        slowest = sorted((request_seconds(request) for request in self.requests), reverse=True)
        return {
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
            "faults": dict(sorted(self.faults.items())),
            "kills": self.faults.get("kill", 0),
            "requests": verdict.requests,
            "completed": verdict.completed,
            "cancelled": verdict.cancelled,
            "retried": verdict.retried,
            "lost": verdict.lost,
            "wrong_tokens": verdict.wrong_tokens,
            "wrong_answers": verdict.wrong_answers,
            "leaks": len(self.leaks),
            "unexpected": len(self.unexpected),
            "broken_by_frontend_kill": self.broken_by_frontend_kill,
            "broken_unexplained": self.broken_unexplained,
            "verified_answers": verdict.verified_answers,
            "verified_tokens": verdict.verified_tokens,
            "reused_tokens": verdict.reused_tokens,
            "forms": dict(verdict.forms),
            "attempts": dict(verdict.attempt_outcomes),
            "slowest_requests_s": [round(each, 1) for each in slowest[:5]],
            "rest_s": round(self.rest_s, 1),
            "unsupported_faults": self.unsupported,
            "not_injected": NOT_INJECTED,
            "definitions": DEFINITIONS,
            "leaks_found": self.leaks,
            "unexpected_found": self.unexpected,
            "problems": verdict.problems,
            "skipped": [
                f"{entry.fault.kind} {entry.fault.node}: {entry.skipped}" for entry in self.history if entry.skipped
            ],
            **self.extra,
        }

    def write(self, folder: Path) -> None:
        """Write report.json, report.html and the history of faults and requests into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        history = [asdict(entry) for entry in self.history]
        (folder / "faults.json").write_text(json.dumps(history, indent=1) + "\n")
        with (folder / "requests.jsonl").open("w") as file:
            for request in self.requests:
                file.write(json.dumps(_request_json(request, self.began_s)) + "\n")
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
        )
        page = environment.get_template("report.html").render(report=self.as_json(), picture=self._picture())
        (folder / "report.html").write_text(page)

    def _picture(self) -> dict[str, Any]:
        """Return the timeline's rows and bars; x is in seconds."""
        nodes = sorted({entry.fault.node for entry in self.history})
        bars = [
            {
                "row": nodes.index(entry.fault.node),
                "x": entry.began_s,
                "width": max(entry.ended_s - entry.began_s, 0.4),
                "kind": str(entry.fault.kind),
                "family": _family(str(entry.fault.kind)),
                "title": " ".join(
                    (str(entry.fault.kind), entry.fault.node, entry.fault.peer, entry.detail, entry.skipped)
                ),
            }
            for entry in sorted(self.history, key=lambda entry: entry.fault.kind == FaultKind.KILL)  # kills on top
        ]
        lanes: list[float] = []
        lines = []
        for request in sorted(self.requests, key=lambda each: each.attempts[0].began_s if each.attempts else 0.0):
            if not request.attempts:
                continue
            begin = request.attempts[0].began_s - self.began_s
            lane = next((at for at, free in enumerate(lanes) if free <= begin), len(lanes))
            lanes[lane:] = [*([] if lane < len(lanes) else [0.0]), *lanes[lane:]]
            lanes[lane] = request.attempts[-1].ended_s - self.began_s
            ends = ", ".join(each.outcome for each in request.attempts)
            title = f"{request.model} {request.form} {request.outcome}: {ends}"
            for number, attempt in enumerate(request.attempts):
                lines.append(
                    {
                        "row": lane,
                        "x": attempt.began_s - self.began_s,
                        "width": max(attempt.ended_s - attempt.began_s, 0.15),
                        "family": "good" if attempt.outcome in ("completed", "cancelled") else "lost"
                        if request.outcome == "lost" and number == len(request.attempts) - 1 else "again",
                        "title": title,
                    }
                )  # fmt: skip
        return {"nodes": nodes, "bars": bars, "lines": lines, "lanes": len(lanes), "seconds": self.seconds}


def request_seconds(request: ClientRequest) -> float:
    """Return the seconds from a request's first attempt to its outcome."""
    return request.attempts[-1].ended_s - request.attempts[0].began_s if request.attempts else 0.0


def _family(kind: str) -> str:
    return kind.split("_")[0]


def _request_json(request: ClientRequest, began_s: float) -> dict[str, Any]:
    body = {name: value for name, value in request.body.items() if name not in ("prompt", "messages")}
    return {
        "number": request.number,
        "model": request.model,
        "form": request.form,
        "outcome": request.outcome,
        "why": request.why,
        "body": body,
        "attempts": [
            {
                "frontend": attempt.frontend,
                "began_s": round(attempt.began_s - began_s, 3),
                "seconds": round(attempt.ended_s - attempt.began_s, 3),
                "outcome": attempt.outcome,
                "detail": attempt.detail[:400],
                "tokens": attempt.received.num_tokens,
                "moonpool": attempt.received.moonpool,
            }
            for attempt in request.attempts
        ],
    }


def explain_breaks(
    requests: Sequence[ClientRequest], history: Sequence[Injected], began_s: float
) -> tuple[int, list[str]]:
    """Return the number of attempts that broke because their frontend was struck, and descriptions of all others."""
    struck = [
        (int(node.rsplit("-", 1)[1]), entry.began_s - 1.0, entry.ended_s + 15.0)
        for entry in history
        for node in (entry.fault.node, entry.fault.peer)
        if node.startswith("frontend") and not entry.skipped
    ]
    explained, others = 0, []
    for request in requests:
        for attempt in request.attempts:
            if attempt.outcome != "broken":
                continue
            first, last = attempt.began_s - began_s, attempt.ended_s - began_s
            if any(host == attempt.frontend and first <= until and since <= last for host, since, until in struck):
                explained += 1
            else:
                others.append(
                    f"{request.model} request {request.number} ({request.form}) broke at {last:.1f} s: {attempt.detail}"
                )
    return explained, others
