"""Checks of a running cluster. Each judge is pure and advises on what it finds."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from moonpool.cluster_view.collector import ClusterObservation
from moonpool.cluster_view.reply import is_pool, samples
from moonpool.doctor.checks import CheckResult, Level, Verdict
from moonpool.doctor.peers import judge_peer
from moonpool_proto.v1 import common_pb2

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2

_MOST_NAMED: Final = 5
_SLOW: Final = 1.5  # relative to the typical node
_HELD_S: Final = 0.25  # longest acceptable delay of an event loop
_CERTIFICATE_S: Final = 14 * 86400.0
_FULL: Final = 0.95
_PREFILLS: Final = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_AGGREGATED)
_DECODES: Final = (common_pb2.ROLE_DECODE, common_pb2.ROLE_AGGREGATED)

Judge = Callable[[ClusterObservation], Verdict]


def judge_cluster(seen: ClusterObservation) -> list[CheckResult]:
    """Return every check's result, in the order in which they are shown."""
    return [CheckResult(name, *judge(seen)) for name, judge in CHECKS.items()]


def judge_conductors(seen: ClusterObservation) -> Verdict:
    away = [f"{name}: {reply}" for name, reply in seen.conductors.items() if isinstance(reply, str)]
    if away:
        advice = "Check its process and its log. API servers use the other conductors, and nodes rejoin by themselves."
        return Level.FAIL, _some(away), advice
    known = {name: _incarnations(reply) for name, reply in seen.conductors.items() if not isinstance(reply, str)}
    everyone = {node for nodes in known.values() for node in nodes}
    missing = [f"{name} lacks {_some(sorted(everyone - nodes.keys()))}" for name, nodes in known.items()]
    missing = [text for name, text in zip(known, missing, strict=True) if everyone - known[name].keys()]
    if missing:
        return (
            Level.WARN,
            _some(missing),
            "Start each node with the addresses of all conductors (repeat --conductor).",
        )
    count = f"{len(known)} conductor{'s' if len(known) > 1 else ''}"
    if len(known) == 1:
        return Level.OK, f"{count}, {len(everyone)} nodes", ""
    return Level.OK, f"{count} with the same {len(everyone)} nodes", ""


def judge_models(seen: ClusterObservation) -> Verdict:
    nodes = [item.node for item in seen.reply.nodes]
    models = sorted({node.model for node in nodes if node.model})
    if not models:
        return Level.FAIL, "no worker has joined", "Start prefill and decode nodes with this conductor's address."
    waiting = [model for model in models if model not in seen.reply.ready_models]
    if waiting:
        advice = "A model needs a prefill and a decode node that are neither draining nor silent, and their pool nodes."
        return Level.FAIL, f"no node can serve {_some(waiting)}", advice
    return Level.OK, f"{_some(models)} can be served", ""


def judge_spares(seen: ClusterObservation) -> Verdict:
    """Find the roles of each model that have only one node."""
    alone = []
    for model, items in _by_model(seen).items():
        able = [item.node for item in items if not item.suspect and not item.report.draining]
        for name, roles in (("prefill", _PREFILLS), ("decode", _DECODES)):
            if sum(node.role in roles for node in able) == 1:
                alone.append(f"{name} of {model}")
    if alone:
        return (
            Level.NOTE,
            f"only one node for {_some(alone)}",
            "Add a second node, so that the loss of one does not interrupt service.",
        )
    return Level.OK, "no role depends on a single node", ""


def judge_nodes(seen: ClusterObservation) -> Verdict:
    silent = [item.node.node_id for item in seen.reply.nodes if item.suspect]
    leaving = [item.node.node_id for item in seen.reply.nodes if item.report.draining and not item.suspect]
    if silent:
        advice = (
            "Silent nodes get no work until they report: check their hosts, logs, and connections to the conductor."
        )
        return Level.FAIL, f"silent: {_some(silent)}", advice
    if leaving:
        return Level.NOTE, f"draining: {_some(leaving)}", "They stop once their requests have finished."
    return Level.OK, "all report", ""


def judge_control(seen: ClusterObservation) -> Verdict:
    if seen.unreachable:
        suspects = {item.node.node_id for item in seen.reply.nodes if item.suspect}
        if seen.unreachable.keys() <= suspects:
            return Level.FAIL, f"{_some(seen.unreachable)} do not answer either", "See the advice on silent nodes."
        found = _some([f"{node}: {why}" for node, why in seen.unreachable.items()])
        advice = (
            f"It reports to the conductor, but cannot be called from {seen.viewpoint}. If API servers and workers "
            "cannot call it either, requests fail: check its --listen and --advertise addresses and the firewall."
        )
        return Level.FAIL, found, advice
    return Level.OK, f"{len(seen.reply.nodes)} nodes answer from {seen.viewpoint}", ""


def judge_kv_ports(seen: ClusterObservation) -> Verdict:
    if seen.kv_ports is None:
        advice = "To check them, run it on a host of the cluster with --conductor in place of --url."
        return Level.NOTE, "not checked: API servers forward no KV", advice
    verdicts = {node: judge_peer(peer, frozenset()) for node, peer in seen.kv_ports.items()}
    bad = {node: verdict for node, verdict in verdicts.items() if verdict[0] in (Level.WARN, Level.FAIL)}
    if bad:
        worst = max((verdict[0] for verdict in bad.values()), key=[Level.WARN, Level.FAIL].index)
        return worst, _some([f"{node}: {found}" for node, (_, found, _) in bad.items()]), next(iter(bad.values()))[2]
    greeted = [peer.greeting for peer in seen.kv_ports.values() if peer.greeting is not None]
    if not greeted:
        return Level.OK, "no node listens for KV over TCP", ""
    in_clear = sum(not greeting.encrypted for greeting in greeted)
    if 0 < in_clear < len(greeted):
        return (
            Level.FAIL,
            f"{in_clear} of {len(greeted)} nodes accept unencrypted KV",
            "Configure certificates on all nodes or on none.",
        )
    slowest = max(greeting.seconds for greeting in greeted)
    how = "unencrypted" if in_clear else "encrypted"
    return Level.OK, f"{len(greeted)} nodes accept KV, {how}, and answer within {1000 * slowest:.3g} ms", ""


def judge_fit(seen: ClusterObservation) -> Verdict:
    """Find workers of one model that differ in what they compute."""
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
        advice = "They cannot exchange KV: start all with the same model folder, --dtype and --block-tokens."
        return Level.FAIL, _some(wrong), advice
    short = [
        f"{model} {min(lengths)} to {max(lengths)}"
        for model, items in _by_model(seen).items()
        if len(lengths := {item.node.max_model_len for item in items}) > 1
    ]
    if short:
        advice = "The shortest applies to all: start all with the same --max-model-len."
        return Level.WARN, f"longest sequences differ: {_some(short)}", advice
    return Level.OK, "workers of each model are compatible", ""


def judge_versions(seen: ClusterObservation) -> Verdict:
    nodes = [item.node for item in seen.reply.nodes]
    versions = Counter(node.software.version for node in nodes if node.software.version)
    found = ", ".join(f"{count} nodes of {version}" for version, count in sorted(versions.items()))
    if len({node.software.kv_wire for node in nodes if node.software.kv_wire}) > 1:
        return Level.FAIL, f"{found}: some of them cannot exchange KV", "Upgrade the older ones now."
    if len(versions) > 1:
        return Level.NOTE, found, "They are compatible; finish the upgrade, or roll it back."
    return Level.OK, found or "no versions are reported", ""


def judge_hosts(seen: ClusterObservation) -> Verdict:
    pools = {item.node.node_id for item in seen.reply.nodes if is_pool(item)}
    workers = [item.node for item in seen.reply.nodes if not is_pool(item)]
    without = [node.node_id for node in workers if node.pool_node_id not in pools]
    if without:
        advice = "Start a pool node on its host: until then its KV is neither stored nor reused."
        return Level.WARN, f"workers whose pool node has not joined: {_some(without)}", advice
    return Level.OK, f"each of {len(workers)} workers has its pool node", ""


def judge_pools(seen: ClusterObservation) -> Verdict:
    degraded = [each.labels["node"] for each in samples(seen.reply, "directory_exact") if not each.value]
    if degraded:
        advice = "The conductor requests a snapshot by itself; if this persists, check its log and the node's load."
        return Level.WARN, f"the conductor's directory of {_some(degraded)} is incomplete", advice
    broken, full = [], []
    for item in seen.reply.nodes:
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
            "See `moonpool pool status` and the kernel's log; replace the disk.",
        )
    if full:
        advice = (
            "They evict the least valuable blocks. To keep more, increase --pool-bytes or add an SSD (--pool-ssd-dir)."
        )
        return Level.NOTE, f"full, and without an SSD: {_some(full)}", advice
    return Level.OK, "the directory is complete, no SSD has failed", ""


def judge_objectives(seen: ClusterObservation) -> Verdict:
    slo = seen.objectives
    if isinstance(slo, str):
        return Level.WARN, f"not available: {slo}", "Run `moonpool slo show`."
    behind = [each.node_id for each in slo.acknowledged if each.digest != slo.current.digest]
    for level, found, advice in (
        (
            Level.WARN,
            [slo.trouble] if slo.trouble else [],
            "They stay in force, but cannot be changed until the store answers again.",
        ),
        (Level.WARN, list(slo.unmeetable), "Loosen the objective, or add faster nodes: its requests are rejected."),
        (Level.WARN, [f"{_some(behind)} apply another version"] if behind else [], "See `moonpool slo show`."),
        (Level.NOTE, list(slo.drift), "The configuration differs from what is in force: see `moonpool slo show`."),
    ):
        if found:
            return level, _some(found), advice
    return Level.OK, f"version {slo.current.version} is in force everywhere", ""


def judge_redis(seen: ClusterObservation) -> Verdict:
    up = {name: _sample(reply, "shared_store_up") for name, reply in seen.conductors.items()}
    down = [name for name, value in up.items() if value == 0]
    if down:
        advice = (
            "Serving continues, but objectives cannot change, and a restarted conductor loses its state. See its log."
        )
        return Level.WARN, f"{_some(down)} cannot use Redis", advice
    used = any(value is not None for value in up.values())
    return Level.OK, "Redis answers" if used else "not used", ""


def judge_speed(seen: ClusterObservation) -> Verdict:
    slow = [
        f"{each.labels['node']} takes {each.value:.1f} times as long for {each.labels['what']}s"
        for each in samples(seen.reply, "node_slowdown")
        if each.value >= _SLOW
    ]
    if slow:
        advice = (
            "Check for other programs on its host, a throttled device, or fewer --threads; it gets less work meanwhile."
        )
        return Level.WARN, _some(slow), advice
    return Level.OK, "no node is much slower than its peers", ""


def judge_loops(seen: ClusterObservation) -> Verdict:
    held = [
        f"{each.labels.get('process', 'conductor')} {1000 * each.value:.0f} ms"
        for each in samples(seen.reply, "event_loop_held_seconds")
        if each.value >= _HELD_S
    ]
    if held:
        advice = "The process is overloaded or its host has too few cores: free a core, or start another process."
        return Level.WARN, f"blocked recently: {_some(held)}", advice
    return Level.OK, "event loops respond", ""


def judge_certificates(seen: ClusterObservation) -> Verdict:
    left = {
        item.node.node_id: item.report.counters["messenger_tls_certificate_left_seconds"]
        for item in seen.reply.nodes
        if "messenger_tls_certificate_left_seconds" in item.report.counters
    }
    ending = [f"{node} in {seconds / 86400:.1f} days" for node, seconds in left.items() if seconds < _CERTIFICATE_S]
    if ending:
        ended = any(left[node] <= 0 for node in left)
        advice = "Replace the certificate file: it is reloaded without a restart."
        return Level.FAIL if ended else Level.WARN, f"expiring: {_some(ending)}", advice
    return (
        Level.OK,
        f"the first of {len(left)} expires in {min(left.values()) / 86400:.0f} days" if left else "none used",
        "",
    )


def judge_frontends(seen: ClusterObservation) -> Verdict:
    troubled = [f"{front.url}: {front.trouble}" for front in seen.frontends if front.trouble]
    if troubled:
        return Level.FAIL, _some(troubled), "See the API server's log."
    if not seen.frontends:
        return Level.NOTE, "none is known here", "Check /ready of each API server."
    return Level.OK, f"{len(seen.frontends)} accept requests", ""


CHECKS: Final[Mapping[str, Judge]] = {
    "conductors": judge_conductors,
    "API servers": judge_frontends,
    "models": judge_models,
    "spare nodes": judge_spares,
    "reports": judge_nodes,
    "control ports": judge_control,
    "KV ports": judge_kv_ports,
    "fit of workers": judge_fit,
    "versions": judge_versions,
    "pool nodes of workers": judge_hosts,
    "KV pool": judge_pools,
    "objectives": judge_objectives,
    "Redis": judge_redis,
    "node speed": judge_speed,
    "event loops": judge_loops,
    "certificates": judge_certificates,
}


def _by_model(seen: ClusterObservation) -> "dict[str, list[conductor_pb2.NodeStatus]]":
    found: dict[str, list[conductor_pb2.NodeStatus]] = defaultdict(list)
    for item in seen.reply.nodes:
        if item.node.model:
            found[item.node.model].append(item)
    return dict(sorted(found.items()))


def _incarnations(reply: "conductor_pb2.ClusterReply") -> dict[str, int]:
    return {item.node.node_id: item.node.incarnation for item in reply.nodes}


def _sample(reply: "conductor_pb2.ClusterReply | str", name: str) -> float | None:
    return None if isinstance(reply, str) else next((each.value for each in samples(reply, name)), None)


def _some(texts: Iterable[str]) -> str:
    """Join the first few texts, and count the others."""
    all_of_them: Sequence[str] = list(texts)
    more = len(all_of_them) - _MOST_NAMED
    return ", ".join(all_of_them[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
