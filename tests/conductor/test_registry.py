"""Registration: nodes that may join, and streams that may report for a node."""

import pytest

from conductor.errors import JoinRefused, SwitchRefused, UnknownNode
from conductor.policy.nodes import NodeTable
from conductor.registry import Registry
from conductor.wire import node_view
from moonpool_proto.v1 import common_pb2, conductor_pb2


def node(**fields):
    whole = {
        "node_id": "a",
        "role": common_pb2.ROLE_AGGREGATED,
        "target": "unix:/a",
        "model": "m",
        "kv_namespace": bytes(16),
        "spec": common_pb2.KvSpec(block_tokens=16),
        "capacity_tokens": 1024,
        "max_model_len": 512,
    }
    return conductor_pb2.Node(**{**whole, **fields})


@pytest.mark.parametrize(
    "field", ["node_id", "target", "model", "kv_namespace", "capacity_tokens", "max_model_len", "spec"]
)
def test_a_worker_that_does_not_describe_itself_is_refused_by_field(field):
    incomplete = node()
    incomplete.ClearField(field)
    with pytest.raises(JoinRefused, match=field):
        Registry().admit(incomplete)


@pytest.mark.parametrize("field", ["capacity_tokens", "kv_bytes_per_token", "window_bytes_per_token"])
def test_a_worker_with_a_size_that_no_sum_can_take_is_refused(field):
    Registry().admit(node(**{field: 1 << 30}))
    with pytest.raises(JoinRefused, match=f"{field} of node .* must be at most"):
        Registry().admit(node(**{field: 1 << 62}))


def test_a_model_with_windows_needs_their_bytes_only_for_the_end_of_a_prefix():
    table = NodeTable()
    table.add(node_view(node(kv_bytes_per_token=100, window_blocks=2, window_bytes_per_token=30)))
    model = table.model(node().model)
    block = node().spec.block_tokens
    assert [model.read_nbytes(blocks) for blocks in (0, 1, 10)] == [0, 130 * block, (1000 + 60) * block]


def test_an_unknown_role_is_refused():
    with pytest.raises(JoinRefused, match="role 0"):
        Registry().admit(node(role=common_pb2.ROLE_UNSPECIFIED))


def test_a_pool_node_needs_no_model():
    Registry().admit(conductor_pb2.Node(node_id="p", role=common_pb2.ROLE_POOL, target="unix:/p"))


def test_a_refused_node_changes_nothing():
    registry = Registry()
    member = registry.admit(node())
    with pytest.raises(JoinRefused):
        registry.admit(node(node_id="b", kv_namespace=bytes(range(16))))
    assert list(registry) == [member]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"spec": common_pb2.KvSpec(block_tokens=8)}, "block_tokens 8, not 16"),
        ({"model_fingerprint": "bb"}, "model fingerprint bb, not aa: other weights"),
        ({"kv_namespace": b"n" * 16}, "another provenance"),
        (
            {"kv_namespace": b"n" * 16, "window_namespace": b"w" * 16},
            "another version of Moonpool, which stores only the last blocks of a sequence of layers with windows",
        ),
    ],
)
def test_a_worker_whose_kv_is_not_its_models_is_refused_and_another_models_is_not(other, said):
    registry = Registry()
    registry.admit(node(model_fingerprint="aa"))
    described = {"node_id": "b", "model_fingerprint": "aa", **other}
    with pytest.raises(JoinRefused, match=rf"'b' has .*{said}.* as node 'a' of the same model 'm'"):
        registry.admit(node(**described))
    registry.admit(node(**described, model="n"))


def test_a_model_may_change_once_its_last_worker_has_left():
    registry = Registry()
    assert registry.remove(registry.admit(node()))
    registry.admit(node(node_id="b", kv_namespace=bytes(range(16))))
    assert registry.worker_of("m").node_id == "b"


def test_a_node_alone_may_come_back_with_other_weights():
    registry = Registry()
    registry.admit(node())
    registry.admit(node(kv_namespace=bytes(range(16)), incarnation=2))
    assert registry.worker_of("m").incarnation == 2


def test_a_replaced_stream_is_told_and_its_end_is_no_loss():
    registry = Registry()
    old = registry.admit(node())
    new = registry.admit(node(incarnation=2))
    assert old.replaced.is_set()
    assert not registry.remove(old)
    assert registry.nodes == {"a": new.node}
    assert registry.remove(new)
    assert registry.worker_of("m") is None


def test_two_nodes_that_are_asked_at_once_do_not_both_give_up_a_role():
    registry = Registry()
    a, b = (registry.admit(node(node_id=name, role=common_pb2.ROLE_PREFILL)) for name in "ab")
    registry.admit(node(node_id="d", role=common_pb2.ROLE_DECODE))
    for _ in range(2):
        registry.ask_to_switch("a", common_pb2.ROLE_DECODE)
    assert a.commands.qsize() == 1, "asked again, it is told once"
    with pytest.raises(SwitchRefused, match="'b' is the last prefill node of 'm'"):
        registry.ask_to_switch("b", common_pb2.ROLE_DECODE)
    registry.note(a, conductor_pb2.NodeReport(draining=True))  # it has begun
    with pytest.raises(SwitchRefused, match="last prefill node"):
        registry.ask_to_switch("b", common_pb2.ROLE_DECODE)
    registry.note(a, conductor_pb2.NodeReport())  # it could not: a prompt took too long
    registry.ask_to_switch("b", common_pb2.ROLE_DECODE)
    assert b.commands.qsize() == 1
    assert registry.switches.state() == {"prefill decode": {"asked": 2, "refused_last": 2}}


def test_a_node_that_has_changed_its_role_can_be_asked_again():
    registry = Registry()
    member = registry.admit(node(role=common_pb2.ROLE_PREFILL))
    registry.admit(node(node_id="b", role=common_pb2.ROLE_PREFILL))
    registry.admit(node(node_id="d", role=common_pb2.ROLE_DECODE))
    registry.ask_to_switch("a", common_pb2.ROLE_DECODE)
    registry.renew(member, node(role=common_pb2.ROLE_DECODE))
    registry.ask_to_switch("a", common_pb2.ROLE_PREFILL)
    assert member.commands.qsize() == 2


def test_a_node_that_says_at_once_that_it_stays_what_it_is_can_be_asked_again():
    registry = Registry()
    member = registry.admit(node(role=common_pb2.ROLE_PREFILL))
    registry.admit(node(node_id="b", role=common_pb2.ROLE_PREFILL))
    registry.ask_to_switch("a", common_pb2.ROLE_DECODE)
    registry.note(member, conductor_pb2.NodeReport(node=node(role=common_pb2.ROLE_PREFILL)))
    assert member.stays
    registry.ask_to_switch("a", common_pb2.ROLE_DECODE)
    assert member.commands.qsize() == 2


def test_changes_of_roles_are_counted_by_what_came_of_them():
    registry = Registry()
    names = {"p": common_pb2.ROLE_PREFILL, "q": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE}
    members = {name: registry.admit(node(node_id=name, role=role)) for name, role in names.items()}
    for answer in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
        registry.ask_to_switch("p", common_pb2.ROLE_DECODE)
        registry.note(members["p"], conductor_pb2.NodeReport(draining=True))
        registry.note(members["p"], conductor_pb2.NodeReport(node=node(node_id="p", role=answer)))
    registry.renew(members["p"], node(node_id="p", role=common_pb2.ROLE_DECODE))
    registry.ask_to_switch("p", common_pb2.ROLE_PREFILL)
    registry.remove(members["p"])
    for name, role in (("q", common_pb2.ROLE_PREFILL), ("q", common_pb2.ROLE_POOL), ("nobody", common_pb2.ROLE_DECODE)):
        with pytest.raises((SwitchRefused, UnknownNode)):
            registry.ask_to_switch(name, role)
    assert registry.switches.state() == {
        " decode": {"refused_unknown_node": 1},
        "decode prefill": {"asked": 1, "left": 1},
        "prefill decode": {"asked": 2, "done": 1, "kept": 1},
        "prefill pool": {"refused_fixed_role": 1},
        "prefill prefill": {"refused_same_role": 1},
    }
    told = {(each.name, *sorted(each.labels.items())): each.value for each in registry.switches.samples()}
    roles = ("from_role", "prefill"), ("model_name", "m")
    done = ("role_switches_total", *roles, ("outcome", "done"), ("to_role", "decode"))
    assert told[done] == 1
    assert told["role_switches_refused_total", *roles, ("reason", "fixed_role"), ("to_role", "pool")] == 1
