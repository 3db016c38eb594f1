"""Command line of the chaos test."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tools.chaos.cluster import BUNDLED, PACED, REAL, START_S, Cluster, chaos_folder
from tools.chaos.faults import Injector, unsupported
from tools.chaos.leaks import growth, held_at_rest, shared_memory, usages
from tools.chaos.load import Load
from tools.chaos.report import Outcome, explain_breaks
from tools.chaos.schedule import ALL_KINDS, ROUND_S, Topology, draw_schedule
from tools.chaos.verify import Verifier
from tools.soak.namespaces import what_is_missing

CLIENTS = {REAL: 4, PACED: 6}
PREFIXES = {REAL: "", PACED: "paced-"}
WARM_UP_S = 3.0
RECOVERY_LIMIT_S = 60.0
DRAIN_LIMIT_S = 240.0  # longer than any request may take
PACED_ANSWER_TOKENS = 128  # default of --paced-answer-tokens
DEFECTS = ("internal_error",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; the last line of output is the report's JSON. Returns 1 if it found a defect."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="nominal duration of the load [%(default)s]")
    parser.add_argument("--seed", type=int, default=None, help="of faults and load [drawn and printed]")
    parser.add_argument("--engines", default="real,paced", help="real, paced or both [%(default)s]")
    parser.add_argument(
        "--kinds", default="", help=f"kinds of faults, comma-separated, of {', '.join(ALL_KINDS)} [all]"
    )
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="folder of the report [%(default)s]")
    parser.add_argument("--keep", action="store_true", help="keep the cluster's logs, in the report's folder")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 31)
    kinds = given.kinds.split(",") if given.kinds else list(ALL_KINDS)
    models = [{"real": REAL, "paced": PACED}.get(name, "") for name in given.engines.split(",")]
    if given.seconds <= 0 or "" in models or set(kinds) - set(ALL_KINDS):
        parser.error("--seconds must be above 0, --engines real, paced or both, --kinds known")
    print(f"chaos test of {given.seconds:.0f} s, seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces and mounts are removed
    # Outside the event loop, which would hold back an interrupt during the verification.
    outcome = asyncio.run(_run(given.seconds, seed, models, kinds, given.out if given.keep else None))
    _verify(outcome, dict.fromkeys(models, BUNDLED))
    outcome.write(given.out)
    print(f"report: {given.out}/report.html")
    for line in (*outcome.verdict.problems, *outcome.leaks, *outcome.unexpected):
        print(f"DEFECT {line}")
    print(json.dumps(outcome.as_json(), ensure_ascii=False))
    return 0 if outcome.is_good else 1


async def _run(seconds: float, seed: int, models: list[str], kinds: list[str], logs: Path | None) -> Outcome:
    missing = what_is_missing() or ""
    segments = shared_memory()
    topology = Topology(tuple(PREFIXES[model] for model in models))
    with chaos_folder() as folder:
        try:
            with Cluster(folder, topology, use_network=not missing) as cluster:
                outcome = await _torment(cluster, seconds, seed, kinds, missing)
        finally:
            if logs is not None:
                _keep_logs(folder, logs)
        outcome.leaks += [f"shared memory {name} is left" for name in sorted(shared_memory() - segments)]
    return outcome


def _verify(outcome: Outcome, models: dict[str, Path]) -> None:
    """Verify all answers. Runs after the cluster has ended."""
    print(f"verifying the answers of {len(outcome.requests)} requests", flush=True)
    began_s = time.monotonic()
    verifier = Verifier.of(models, paced=[PACED], answer_tokens=PACED_ANSWER_TOKENS)
    outcome.verdict = verifier.judge(outcome.requests)
    outcome.extra["verification_s"] = round(time.monotonic() - began_s, 1)


async def _torment(cluster: Cluster, seconds: float, seed: int, kinds: list[str], network_missing: str) -> Outcome:
    cannot = unsupported(cluster, network_missing)
    rounds = draw_schedule(seed, seconds, cluster.topology, [kind for kind in kinds if kind not in cannot])
    supervision = asyncio.create_task(cluster.supervise())
    if lacking := await cluster.wait_recovered(START_S):
        raise RuntimeError(f"the cluster did not start: {lacking}; see the logs with --keep")
    load = Load(cluster.urls, seed, {model: CLIENTS[model] for model in cluster.models})
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        began_s = time.monotonic()
        load.begin(session)
        await asyncio.sleep(WARM_UP_S)
        before = usages(cluster)
        injector = Injector(cluster, began_s)
        await injector.run(rounds, round_s=ROUND_S, recovery_limit_s=RECOVERY_LIMIT_S)
        ended_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(load.end(), DRAIN_LIMIT_S)
    leaks, rest_s = await held_at_rest(cluster)
    leaks += growth(before, usages(cluster))
    if supervision.done():
        supervision.result()  # raises what ended it
    supervision.cancel()
    explained, others = explain_breaks(load.requests, injector.history, began_s)
    unexpected = [*cluster.unexpected_exits, *injector.slow_recoveries, *others]
    unexpected += [f"a client ended: {error!r}" for error in load.failures()]
    unexpected += [
        f"{request.model} request {request.number} ({request.form}): {attempt.outcome}: {attempt.detail[:300]}"
        for request in load.requests
        for attempt in request.attempts
        if attempt.outcome in DEFECTS
    ]
    return Outcome(
        seconds=ended_s - began_s,
        seed=seed,
        faults=injector.counts(),
        history=injector.history,
        requests=load.requests,
        verdict=Verifier({}, {}).judge([]),
        leaks=leaks,
        unexpected=unexpected,
        unsupported=cannot,
        broken_by_frontend_kill=explained,
        broken_unexplained=len(others),
        rest_s=rest_s,
        began_s=began_s,
        extra={"half_open_connections": load.half_open, "disk_errors_injected": _disk_errors(cluster)},
    )


def _disk_errors(cluster: Cluster) -> int:
    return sum(role.num_injected for role in cluster.roles.values())


def _keep_logs(folder: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        (logs / log.name).write_bytes(log.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
