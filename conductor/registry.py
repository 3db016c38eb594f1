"""Registry of joined nodes: admission to the cluster, descriptions, last reports, drain and role changes. No I/O."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from conductor.directory.feeds import sample
from conductor.errors import JoinRefused, NodeInUse, SwitchRefused, UnknownNode
from conductor.wire import ROLES, node_ref
from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc.control import check_target
from rpc.errors import InvalidArgument
from rpc.versions import own_software, why_not_together

Outcome = Literal["advised", "asked", "done", "kept", "left"]


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Role change of a node: model, former role and new role; "" if unknown."""

    model: str
    from_role: str
    to_role: str


class RoleSwitches:
    """Counts of role changes by outcome.

    `asked`: commands sent to nodes; each ends as `done`, `kept` (the node kept its role) or `left` (it left first).
    `advised`: only suggested. Rejected changes were not sent to a node.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[RoleChange, Outcome]] = Counter()
        self._refused: Counter[tuple[RoleChange, str]] = Counter()

    def count(self, change: RoleChange, outcome: Outcome) -> None:
        """Count a change."""
        self._counts[change, outcome] += 1

    def refused(self, change: RoleChange, reason: str) -> None:
        """Count a rejected change."""
        self._refused[change, reason] += 1

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield the counts as metrics; a count is present from its first event on."""
        for name, label, counts in self._by_label():
            for (change, value), count in sorted(counts.items(), key=_key):
                labels = {"model_name": change.model, "from_role": change.from_role, "to_role": change.to_role}
                yield sample(name, count, **labels, **{label: value})

    def state(self) -> dict[str, dict[str, int]]:
        """Return counts by "from to" roles, and outcome or `refused_REASON`, over all models."""
        counts_by_roles: dict[str, Counter[str]] = defaultdict(Counter)
        for (change, outcome), count in sorted(self._counts.items(), key=_key):
            counts_by_roles[f"{change.from_role} {change.to_role}"][outcome] += count
        for (change, reason), count in sorted(self._refused.items(), key=_key):
            counts_by_roles[f"{change.from_role} {change.to_role}"][f"refused_{reason}"] += count
        return {roles: dict(counts) for roles, counts in counts_by_roles.items()}

    def _by_label(self) -> "Iterator[tuple[str, str, Counter[tuple[RoleChange, str]]]]":
        yield "role_switches_total", "outcome", Counter(self._counts)
        yield "role_switches_refused_total", "reason", self._refused


def _key(item: tuple[tuple[RoleChange, str], int]) -> tuple[str, str, str, str]:
    (change, value), _ = item
    return change.model, change.from_role, change.to_role, value


_MAX_MODELS_ASKED = 1000  # limit of the cache, since model names come from clients
_CHANGING = frozenset({common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE})  # roles between which a node may change
_LARGEST = 1 << 31  # limit of sizes, so that the product of two (bytes of a block) fits into an int64


@dataclass(eq=False)
class JoinedNode:
    """One open Join stream."""

    node: conductor_pb2.Node
    report: conductor_pb2.NodeReport
    replaced: asyncio.Event = field(default_factory=asyncio.Event)  # set when another stream has joined as this node
    commands: asyncio.Queue[conductor_pb2.NodeCommand] = field(default_factory=asyncio.Queue)  # not yet sent
    is_leaving: bool = False  # a drain command was sent
    is_to_switch: bool = False  # a role change was requested and has not started
    asked: RoleChange | None = None  # the requested change, until the node confirms or rejects it

    @property
    def stays(self) -> bool:
        """True if the node is expected to keep its role."""
        return not (self.is_leaving or self.is_to_switch or self.report.draining)

    def note(self, report: conductor_pb2.NodeReport) -> None:
        """Store the parts of a report that `Cluster` returns."""
        # A started change is visible in the reports; a description in a report confirms or rejects it.
        self.is_to_switch = self.is_to_switch and not (report.draining or report.HasField("node"))
        self.report = conductor_pb2.NodeReport(
            num_waiting=report.num_waiting,
            num_running=report.num_running,
            free_tokens=report.free_tokens,
            draining=report.draining,
        )
        self.report.counters.MergeFrom(report.counters)


class Registry:
    """The joined nodes. All workers of a model have the same KV namespace and spec."""

    def __init__(self) -> None:
        self.switches = RoleSwitches()
        self._members: dict[str, JoinedNode] = {}
        self._nodes: dict[str, conductor_pb2.Node] = {}
        self._refs: dict[str, conductor_pb2.NodeRef] = {}
        self._peers: dict[str, conductor_pb2.Node | None] = {}  # cache of `worker_of` since the last change
        self._versions: dict[
            bytes, set[str]
        ] = {}  # node ids by serialised software version: few versions among many nodes

    def __iter__(self) -> Iterator[JoinedNode]:
        return iter([self._members[node_id] for node_id in sorted(self._members)])

    @property
    def nodes(self) -> Mapping[str, conductor_pb2.Node]:
        """Descriptions by node id."""
        return self._nodes

    @property
    def refs(self) -> Mapping[str, conductor_pb2.NodeRef]:
        """Public references by node id; read-only."""
        return self._refs

    def admit(self, node: conductor_pb2.Node) -> JoinedNode:
        """Add a node; an earlier stream of the same node id is ended. Raises JoinRefused without side effects."""
        self._check(node)
        former = self._members.get(node.node_id)
        if former is not None:
            former.replaced.set()
            self._end_switch(former, "left")
            self._forget_version(former.node)
        self._versions.setdefault(node.software.SerializeToString(), set()).add(node.node_id)
        member = self._members[node.node_id] = JoinedNode(node, conductor_pb2.NodeReport())
        self._nodes[node.node_id] = node
        self._refs[node.node_id] = node_ref(node)
        self._peers.clear()
        return member

    def ask_to_drain(self, node_id: str) -> None:
        """Send the node a drain command. Raises UnknownNode, or NodeInUse for a pool node with workers."""
        member = self._members.get(node_id)
        if member is None:
            raise self._unknown(node_id)
        users = [other.node.node_id for other in self if other.node.pool_node_id == node_id]
        if users:
            raise NodeInUse(f"pool node {node_id!r} serves the workers {', '.join(users)}; drain these first")
        if not member.is_leaving:
            member.is_leaving = True
            member.commands.put_nowait(conductor_pb2.NodeCommand(drain=conductor_pb2.Drain()))

    def ask_to_switch(self, node_id: str, role: common_pb2.Role.ValueType) -> None:
        """Send a prefill or decode node the command to change its role. Raises UnknownNode or SwitchRefused."""
        change = self.change_of(node_id, ROLES.get(role, ""))
        try:
            member = self._switchable(node_id, role)
        except UnknownNode:
            self.switches.refused(change, "unknown_node")
            raise
        except SwitchRefused as error:
            self.switches.refused(change, error.reason)
            raise
        if not member.is_to_switch:
            self._end_switch(member, "kept")  # an earlier request
            member.is_to_switch, member.asked = True, change
            self.switches.count(change, "asked")
            member.commands.put_nowait(conductor_pb2.NodeCommand(switch_role=conductor_pb2.SwitchRole(role=role)))

    def change_of(self, node_id: str, role: str) -> RoleChange:
        """Return the change of the node to that role."""
        node = self._nodes.get(node_id)
        return RoleChange("", "", role) if node is None else RoleChange(node.model, ROLES[node.role], role)

    def note(self, member: JoinedNode, report: conductor_pb2.NodeReport) -> None:
        """Store the parts of a report that `Cluster` returns, and complete a role change that it confirms."""
        if member.asked is not None and report.HasField("node"):
            self._end_switch(member, "done" if member.asked.to_role == ROLES[report.node.role] else "kept")
        member.note(report)

    def _end_switch(self, member: JoinedNode, outcome: Literal["done", "kept", "left"]) -> None:
        if member.asked is not None:
            self.switches.count(member.asked, outcome)
            member.asked = None

    def _switchable(self, node_id: str, role: common_pb2.Role.ValueType) -> JoinedNode:
        """Return the node if it may change to that role. Raises UnknownNode or SwitchRefused."""
        member = self._members.get(node_id)
        if member is None:
            raise self._unknown(node_id)
        node = member.node
        if role == node.role:
            raise SwitchRefused("same_role", f"node {node_id!r} is already a {ROLES[node.role]} node")
        if not {role, node.role} <= _CHANGING:
            wanted = ROLES.get(role, "unknown")
            raise SwitchRefused(
                "fixed_role",
                f"node {node_id!r} is a {ROLES[node.role]} node and cannot become a {wanted} node: "
                "only prefill and decode nodes can change their role",
            )
        if member.is_leaving or member.report.draining:
            raise SwitchRefused("draining", f"node {node_id!r} is draining")
        others = [
            other
            for other in self
            if other is not member and (other.node.model, other.node.role) == (node.model, node.role) and other.stays
        ]
        if not others:
            raise SwitchRefused("last", f"node {node_id!r} is the last {ROLES[node.role]} node of {node.model!r}")
        return member

    def renew(self, member: JoinedNode, node: conductor_pb2.Node) -> None:
        """Replace the node's description after a role change. Raises JoinRefused if more than its role has changed."""
        before = conductor_pb2.Node()
        before.CopyFrom(member.node)
        before.role = node.role
        if before != node or not {node.role, member.node.role} <= _CHANGING:
            raise JoinRefused(
                f"node {member.node.node_id!r} changed its description within a stream; only its role may change"
            )
        member.node = self._nodes[node.node_id] = node
        self._refs[node.node_id] = node_ref(node)
        member.is_to_switch = False
        self._peers.clear()

    def remove(self, member: JoinedNode) -> bool:
        """Remove the node after its stream ended. Return False if another stream has replaced it."""
        if self._members.get(member.node.node_id) is not member:
            return False
        self._end_switch(member, "left")
        self._forget_version(member.node)
        del self._members[member.node.node_id], self._nodes[member.node.node_id], self._refs[member.node.node_id]
        self._peers.clear()
        return True

    def worker_of(self, model: str) -> conductor_pb2.Node | None:
        """Return any worker of the model (all have the same KV namespace and spec), or None."""
        if model not in self._peers:
            if len(self._peers) > _MAX_MODELS_ASKED:
                self._peers.clear()
            self._peers[model] = self._find_worker(model, other_than="")
        return self._peers[model]

    def _unknown(self, node_id: str) -> UnknownNode:
        joined = ", ".join(sorted(self._members)) or "none"
        return UnknownNode(f"unknown node {node_id!r}; joined nodes: {joined}")

    def _find_worker(self, model: str, *, other_than: str) -> conductor_pb2.Node | None:
        workers = (member.node for member in self if ROLES[member.node.role] != "pool")
        return next((node for node in workers if node.model == model and node.node_id != other_than), None)

    def _check(self, node: conductor_pb2.Node) -> None:
        if node.role not in ROLES:
            raise JoinRefused(f"node {node.node_id!r} has role {node.role}, which this conductor does not know")
        self._check_software(node)
        missing = [name for name in ("node_id", "target") if not getattr(node, name)]
        if ROLES[node.role] != "pool":
            wanted = ("model", "kv_namespace", "capacity_tokens", "max_model_len")
            missing += [name for name in wanted if not getattr(node, name)]
            missing += [] if node.spec.block_tokens else ["spec.block_tokens"]
        if missing:
            raise JoinRefused(f"node {node.node_id!r} joined without {', '.join(missing)}")
        try:
            check_target(node.target)
        except InvalidArgument as error:
            raise JoinRefused(f"node {node.node_id!r} cannot be called: {error}") from error
        sizes = {
            "capacity_tokens": node.capacity_tokens,
            "kv_bytes_per_token": node.kv_bytes_per_token,
            "window_bytes_per_token": node.window_bytes_per_token,
            "spec.block_tokens": node.spec.block_tokens,
        }
        for name, size in sizes.items():
            if size > _LARGEST:
                raise JoinRefused(f"{name} of node {node.node_id!r} must be at most {_LARGEST}, got {size}")
        peer = self._find_worker(node.model, other_than=node.node_id) if ROLES[node.role] != "pool" else None
        if peer is not None:
            _check_same_kv(node, peer)

    def _check_software(self, node: conductor_pb2.Node) -> None:
        who = f"node {node.node_id!r}"
        problem = why_not_together(node.software, who, own_software(), "this conductor")
        for version, node_ids in self._versions.items():
            other = min(node_ids - {node.node_id}, default="")
            if other and not problem:
                problem = why_not_together(
                    node.software, who, common_pb2.Software.FromString(version), f"node {other!r}"
                )
        if problem:
            raise JoinRefused(problem)

    def _forget_version(self, node: conductor_pb2.Node) -> None:
        version = node.software.SerializeToString()
        self._versions[version].discard(node.node_id)
        if not self._versions[version]:
            del self._versions[version]


def _kv_dtype(spec: common_pb2.KvSpec) -> str:
    """Return the types of the KV, with the sizes of groups that share a scale."""
    kinds = {f"{g.dtype} in groups of {g.scale_group}" if g.scale_group else g.dtype for g in spec.groups}
    return " and ".join(sorted(kinds))


def _check_same_kv(node: conductor_pb2.Node, peer: conductor_pb2.Node) -> None:
    if node.spec.block_tokens != peer.spec.block_tokens:
        what = f"block_tokens {node.spec.block_tokens}, not {peer.spec.block_tokens}"
    elif _kv_dtype(node.spec) != _kv_dtype(peer.spec):
        what = f"KV in {_kv_dtype(node.spec)}, not {_kv_dtype(peer.spec)},"
    elif node.spec != peer.spec:
        what = "another KV spec (layers, heads or windows)"
    elif node.model_fingerprint != peer.model_fingerprint:
        what = f"model fingerprint {node.model_fingerprint}, not {peer.model_fingerprint}: other weights"
    elif bool(node.window_namespace) != bool(peer.window_namespace):
        kept = ("only the last blocks of a sequence", "every block")
        own, other = kept if node.window_namespace else reversed(kept)
        what = f"another version of Moonpool, which stores {own} of layers with windows, not {other},"
    elif node.kv_namespace != peer.kv_namespace:
        what = (
            f"KV namespace {node.kv_namespace.hex()}, not {peer.kv_namespace.hex()}: another provenance or engine "
            f"({node.hardware or 'unknown'}; {peer.hardware or 'unknown'})"
        )
    else:
        return
    raise JoinRefused(
        f"node {node.node_id!r} has {what} as node {peer.node_id!r} of the same model {node.model!r}; "
        "start it with the same model folder, dtype, kv_dtype and block_tokens, or under another served model name"
    )
