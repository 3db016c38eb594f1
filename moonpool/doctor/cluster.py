"""What is judged of a running cluster. Each judge is pure, and says what to do about what it finds."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from moonpool.cluster_view.collector import ClusterSeen
from moonpool.doctor.checks import Finding, Level, Verdict
from moonpool.doctor.peers import judge_peer
from moonpool_proto.v1 import common_pb2

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2

_MOST_NAMED: Final = 5
_SLOW: Final = 1.5  # times as long as a usual node
_HELD_S: Final = 0.25  # of an event loop: others' tokens wait so long
_CERTIFICATE_S: Final = 14 * 86400.0
_FULL: Final = 0.95
_PREFILLS: Final = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_AGGREGATED)
_DECODES: Final = (common_pb2.ROLE_DECODE, common_pb2.ROLE_AGGREGATED)

Judge = Callable[[ClusterSeen], Verdict]


def judge_cluster(seen: ClusterSeen) -> list[Finding]:
    """Every check's finding, in the order in which it is shown."""
    return [Finding(name, *judge(seen)) for name, judge in CHECKS.items()]


def judge_conductors(seen: ClusterSeen) -> Verdict:
    away = [f"{name}: {reply}" for name, reply in seen.conductors.items() if isinstance(reply, str)]
    if away:
        advice = (
            "Look at its log and whether it runs: front doors go to the others, and nodes join again by themselves."
        )
        return Level.FAIL, _some(away), advice
    known = {name: _incarnations(reply) for name, reply in seen.conductors.items() if not isinstance(reply, str)}
    everyone = {node for nodes in known.values() for node in nodes}
    missing = [f"{name} does not know {_some(sorted(everyone - nodes.keys()))}" for name, nodes in known.items()]
    missing = [text for name, text in zip(known, missing, strict=True) if everyone - known[name].keys()]
    if missing:
        return (
            Level.WARN,
            _some(missing),
            "Start each node with all conductors' addresses (--conductor, once for each).",
        )
    count = f"{len(known)} conductor{'s' if len(known) > 1 else ''}"
    if len(known) == 1:
        return Level.OK, f"{count}, {len(everyone)} nodes", ""
    return Level.OK, f"{count} that know the same {len(everyone)} nodes", ""


def judge_models(seen: ClusterSeen) -> Verdict:
    nodes = [item.node for item in seen.told.nodes]
    models = sorted({node.model for node in nodes if node.model})
    if not models:
        return Level.FAIL, "no worker has joined", "Start prefill and decode nodes with this conductor's address."
    waiting = [model for model in models if model not in seen.told.ready_models]
    if waiting:
        advice = "A model needs a prefill and a decode node that are neither draining nor silent, and their pool node."
        return Level.FAIL, f"no place can serve {_some(waiting)}", advice
    return Level.OK, f"{_some(models)} can be served", ""


def judge_spares(seen: ClusterSeen) -> Verdict:
    """Which roles of which models hang on one node."""
    alone = []
    for model, items in _by_model(seen).items():
        able = [item.node for item in items if not item.suspect and not item.report.draining]
        for name, roles in (("prefill", _PREFILLS), ("decode", _DECODES)):
            if sum(node.role in roles for node in able) == 1:
                alone.append(f"{name} of {model}")
    if alone:
        return Level.NOTE, f"one node alone for {_some(alone)}", "With a second one its loss costs time, not service."
    return Level.OK, "no role hangs on one node", ""


def judge_nodes(seen: ClusterSeen) -> Verdict:
    silent = [item.node.node_id for item in seen.told.nodes if item.suspect]
    leaving = [item.node.node_id for item in seen.told.nodes if item.report.draining and not item.suspect]
    if silent:
        advice = "It gets no work until it reports again: look at its host, its log, and the way to the conductor."
        return Level.FAIL, f"silent: {_some(silent)}", advice
    if leaving:
        return Level.NOTE, f"draining: {_some(leaving)}", "They end by themselves once nothing runs on them."
    return Level.OK, "all report", ""


def judge_control(seen: ClusterSeen) -> Verdict:
    if seen.silent:
        suspects = {item.node.node_id for item in seen.told.nodes if item.suspect}
        if seen.silent.keys() <= suspects:
            return Level.FAIL, f"{_some(seen.silent)} do not answer either", "As for their reports."
        found = _some([f"{node}: {why}" for node, why in seen.silent.items()])
        advice = (
            "The conductor hears it, but whoever is here cannot call it. If front doors and workers cannot either, "
            "requests fail: check its --listen and --advertise addresses and the firewall."
        )
        return Level.FAIL, found, advice
    return Level.OK, f"{len(seen.told.nodes)} nodes answer from here", ""


def judge_doors(seen: ClusterSeen) -> Verdict:
    verdicts = {node: judge_peer(peer, frozenset()) for node, peer in seen.doors.items()}
    bad = {node: verdict for node, verdict in verdicts.items() if verdict[0] in (Level.WARN, Level.FAIL)}
    if bad:
        worst = max((verdict[0] for verdict in bad.values()), key=[Level.WARN, Level.FAIL].index)
        return worst, _some([f"{node}: {found}" for node, (_, found, _) in bad.items()]), next(iter(bad.values()))[2]
    greeted = [peer.greeting for peer in seen.doors.values() if peer.greeting is not None]
    if not greeted:
        return Level.OK, "no node listens at TCP", ""
    in_clear = sum(not greeting.encrypted for greeting in greeted)
    if 0 < in_clear < len(greeted):
        return (
            Level.FAIL,
            f"{in_clear} of {len(greeted)} nodes take KV in the clear",
            "Set certificates on all or none.",
        )
    slowest = max(greeting.seconds for greeting in greeted)
    how = "in the clear" if in_clear else "encrypted"
    return Level.OK, f"{len(greeted)} nodes take KV, {how}, after {1000 * slowest:.3g} ms at most", ""


def judge_fit(seen: ClusterSeen) -> Verdict:
    """Workers of one model must compute the same thing."""
    wrong = []
    for model, items in _by_model(seen).items():
        for what, values in (
            ("weights", {item.node.model_fingerprint for item in items}),
            ("KV layout", {item.node.kv_namespace.hex() for item in items}),
            ("block_tokens", {str(item.node.spec.block_tokens) for item in items}),
        ):
            if len(values) > 1:
                wrong.append(f"workers of {model} differ in {what}")
    if wrong:
        advice = (
            "Start all of them with the same model folder, --dtype and --block-tokens; no KV goes between them now."
        )
        return Level.FAIL, _some(wrong), advice
    short = [
        f"{model} {min(lengths)} to {max(lengths)}"
        for model, items in _by_model(seen).items()
        if len(lengths := {item.node.max_model_len for item in items}) > 1
    ]
    if short:
        advice = "The shortest holds for all: start all with the same --max-model-len."
        return Level.WARN, f"longest sequences differ: {_some(short)}", advice
    return Level.OK, "workers of each model fit together", ""


def judge_versions(seen: ClusterSeen) -> Verdict:
    nodes = [item.node for item in seen.told.nodes]
    versions = Counter(node.software.version for node in nodes if node.software.version)
    found = ", ".join(f"{count} nodes of {version}" for version, count in sorted(versions.items()))
    if len({node.software.kv_wire for node in nodes if node.software.kv_wire}) > 1:
        return Level.FAIL, f"{found}: no KV goes between some of them", "Replace the older ones now."
    if len(versions) > 1:
        return Level.NOTE, found, "They work together; let the upgrade come to its end, or go back."
    return Level.OK, found or "none are told", ""


def judge_hosts(seen: ClusterSeen) -> Verdict:
    pools = {item.node.node_id for item in seen.told.nodes if item.node.role == common_pb2.ROLE_POOL}
    workers = [item.node for item in seen.told.nodes if item.node.role != common_pb2.ROLE_POOL]
    without = [node.node_id for node in workers if node.pool_node_id not in pools]
    if without:
        advice = "Start a pool node on its host: until then what it computes is not kept, and nothing is found."
        return Level.WARN, f"their pool node has not joined: {_some(without)}", advice
    return Level.OK, f"each of {len(workers)} workers has its pool node", ""


def judge_pools(seen: ClusterSeen) -> Verdict:
    samples = seen.told.samples
    degraded = [each.labels["node"] for each in samples if each.name == "directory_exact" and not each.value]
    if degraded:
        advice = "It is asked for a snapshot by itself; if it lasts, look at the conductor's log and the node's load."
        return Level.WARN, f"the conductor does not know all that {_some(degraded)} holds", advice
    broken, full = [], []
    for item in seen.told.nodes:
        counters = item.report.counters
        if counters.get("pool_ssd_capacity_bytes"):
            if not (counters.get("pool_ssd_readable", 1.0) and counters.get("pool_ssd_writable", 1.0)):
                broken.append(item.node.node_id)
        elif counters.get("pool_used_bytes", 0.0) > _FULL * counters.get("pool_capacity_bytes", float("inf")):
            full.append(item.node.node_id)
    if broken:
        return (
            Level.FAIL,
            f"the SSD failed on {_some(broken)}",
            "See `moonpool pool status` and the kernel's log; replace it.",
        )
    if full:
        advice = (
            "It evicts what is least worth keeping. More memory (--pool-bytes) or an SSD (--pool-ssd-dir) keeps more."
        )
        return Level.NOTE, f"full, and without an SSD: {_some(full)}", advice
    return Level.OK, "all is known, no SSD has failed", ""


def judge_objectives(seen: ClusterSeen) -> Verdict:
    slo = seen.objectives
    if isinstance(slo, str):
        return Level.WARN, f"not told: {slo}", "Try `moonpool slo show`."
    behind = [each.node_id for each in slo.acknowledged if each.digest != slo.current.digest]
    for level, found, advice in (
        (Level.WARN, [slo.trouble] if slo.trouble else [], "They hold, and cannot be changed until it answers again."),
        (Level.WARN, list(slo.unmeetable), "Loosen the objective, or add faster nodes: what comes for it is rejected."),
        (Level.WARN, [f"{_some(behind)} go by another version"] if behind else [], "See `moonpool slo show`."),
        (Level.NOTE, list(slo.drift), "The configuration says otherwise than what is in force: `moonpool slo show`."),
    ):
        if found:
            return level, _some(found), advice
    return Level.OK, f"version {slo.current.version} is in force everywhere", ""


def judge_redis(seen: ClusterSeen) -> Verdict:
    told = {name: _sample(reply, "shared_store_up") for name, reply in seen.conductors.items()}
    down = [name for name, value in told.items() if value == 0]
    if down:
        advice = "Requests go on; objectives cannot be changed, and a conductor that restarts knows less. See its log."
        return Level.WARN, f"{_some(down)} cannot use Redis", advice
    used = any(value is not None for value in told.values())
    return Level.OK, "Redis answers" if used else "none is used", ""


def judge_paces(seen: ClusterSeen) -> Verdict:
    slow = [
        f"{each.labels['node']} takes {each.value:.1f} times as long for {each.labels['what']}s"
        for each in seen.told.samples
        if each.name == "node_slowdown" and each.value >= _SLOW
    ]
    if slow:
        advice = "Look for others on its host, a throttled device, fewer --threads; it is given less work meanwhile."
        return Level.WARN, _some(slow), advice
    return Level.OK, "no node is much slower than its like", ""


def judge_loops(seen: ClusterSeen) -> Verdict:
    held = [
        f"{each.labels.get('process', 'conductor')} {1000 * each.value:.0f} ms"
        for each in seen.told.samples
        if each.name == "event_loop_held_seconds" and each.value >= _HELD_S
    ]
    if held:
        advice = "Its host has too few cores for it, or it has too much to do: give it a core, or start another."
        return Level.WARN, f"held up of late: {_some(held)}", advice
    return Level.OK, "event loops come round", ""


def judge_certificates(seen: ClusterSeen) -> Verdict:
    left = {
        item.node.node_id: item.report.counters["messenger_tls_certificate_left_seconds"]
        for item in seen.told.nodes
        if "messenger_tls_certificate_left_seconds" in item.report.counters
    }
    ending = [f"{node} in {seconds / 86400:.1f} days" for node, seconds in left.items() if seconds < _CERTIFICATE_S]
    if ending:
        ended = any(left[node] <= 0 for node in left)
        advice = "Write the new certificate into its file: it is read again without a restart."
        return Level.FAIL if ended else Level.WARN, f"ending: {_some(ending)}", advice
    return (
        Level.OK,
        f"the first of {len(left)} ends in {min(left.values()) / 86400:.0f} days" if left else "none used",
        "",
    )


def judge_fronts(seen: ClusterSeen) -> Verdict:
    troubled = [f"{front.url}: {front.trouble}" for front in seen.fronts if front.trouble]
    if troubled:
        return Level.FAIL, _some(troubled), "It says why it takes no requests; look at its log."
    if not seen.fronts:
        return Level.NOTE, "none is known here", "Ask each one's /ready."
    return Level.OK, f"{len(seen.fronts)} take requests", ""


CHECKS: Final[Mapping[str, Judge]] = {
    "conductors": judge_conductors,
    "front doors": judge_fronts,
    "models": judge_models,
    "spare nodes": judge_spares,
    "reports": judge_nodes,
    "control ports": judge_control,
    "KV ports": judge_doors,
    "fit of workers": judge_fit,
    "versions": judge_versions,
    "pool nodes of workers": judge_hosts,
    "KV pool": judge_pools,
    "objectives": judge_objectives,
    "Redis": judge_redis,
    "paces": judge_paces,
    "event loops": judge_loops,
    "certificates": judge_certificates,
}


def _by_model(seen: ClusterSeen) -> "dict[str, list[conductor_pb2.NodeStatus]]":
    found: dict[str, list[conductor_pb2.NodeStatus]] = defaultdict(list)
    for item in seen.told.nodes:
        if item.node.model:
            found[item.node.model].append(item)
    return dict(sorted(found.items()))


def _incarnations(reply: "conductor_pb2.ClusterReply") -> dict[str, int]:
    return {item.node.node_id: item.node.incarnation for item in reply.nodes}


def _sample(reply: "conductor_pb2.ClusterReply | str", name: str) -> float | None:
    return None if isinstance(reply, str) else next((each.value for each in reply.samples if each.name == name), None)


def _some(texts: Iterable[str]) -> str:
    """Of many only the first few."""
    all_of_them: Sequence[str] = list(texts)
    more = len(all_of_them) - _MOST_NAMED
    return ", ".join(all_of_them[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
