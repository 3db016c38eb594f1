"""Ray's resources for a cluster, and a node's settings on its host."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.config import ServeConfig, all_settings, load
from moonpool.errors import RayUnusable
from moonpool.plan import Planner, RolePlan
from moonpool.runtime.choice import chosen_runtime
from moonpool.runtime.ray_hosts import RayHost, bundle_of, check_offer, environment, hosts, local_resources, located
from moonpool.runtime.ray_session import wait_for_offer
from moonpool.supervision.http_port import claim_port

NODES = [
    {
        "NodeID": "aa",
        "NodeManagerAddress": "10.0.0.2",
        "Alive": True,
        "Resources": {"CPU": 8.0, "moonpool_prefill": 2.0},
    },
    {"NodeID": "bb", "NodeManagerAddress": "10.0.0.3", "Alive": False, "Resources": {"moonpool_decode": 9.0}},
]


def config(**flags: Any) -> ServeConfig:
    given = {key: str(value) for key, value in flags.items()}
    return load(ServeConfig, flags=given, environ={}, config_file=None, known=all_settings())


def plans(**flags: Any) -> dict[str, RolePlan]:
    planner = Planner(config(**flags), run_dir=Path("/run/m"), port=1, cores=8, conductor="10.0.0.1:7000")
    return {plan.node_id: plan for plan in [*planner.cluster(), planner.pool(0)]}


def test_dead_hosts_offer_nothing_and_the_missing_resource_is_named_with_what_to_do() -> None:
    with pytest.raises(RayUnusable) as refused:
        check_offer([{"moonpool_prefill": 1.0}, {"moonpool_decode": 1.0}], hosts(NODES))
    said = str(refused.value)
    assert "moonpool_decode: 1 required, 0 offered" in said
    assert "moonpool_prefill" not in said.split(";")[0]
    assert "10.0.0.2 offers moonpool_prefill=2" in said
    assert "ray start --address=HEAD:6379 --resources=" in said


def test_who_joins_a_cluster_waits_for_the_hosts_and_nobody_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    offer = {"moonpool_prefill": 1.0, "moonpool_decode": 1.0, "moonpool_pool": 1.0}
    late = [NODES, NODES, [{**NODES[0], "Resources": offer | {"GPU": 2.0}}]]
    waits = iter(late)
    assert wait_for_offer(config(join="c:1", runtime="ray"), lambda: next(waits), every_s=0.0)  # a GPU for each
    told = capsys.readouterr().err
    assert told.count("Waiting for hosts: the Ray cluster lacks resources") == 1
    with pytest.raises(RayUnusable, match="lacks resources"):
        wait_for_offer(config(runtime="ray"), lambda: NODES)
    assert not wait_for_offer(config(runtime="ray"), lambda: [{**NODES[0], "Resources": offer}])


def test_a_host_that_takes_workers_must_take_a_pool_node() -> None:
    with pytest.raises(RayUnusable, match=r"10\.0\.0\.2 offer to take workers, but no moonpool_pool"):
        check_offer([{"moonpool_prefill": 1.0}], hosts(NODES))


def test_a_ray_of_our_own_offers_enough() -> None:
    check_offer([{"moonpool_prefill": 1.0}] * 256, {"aa": RayHost("aa", "127.0.0.1", local_resources())})


def test_nodes_lie_on_tcp_at_their_hosts_address_and_use_its_pool_node() -> None:
    planned = plans(decode_nodes=2)
    host = RayHost("aa", "10.0.0.2", {"CPU": 8.0, "moonpool_prefill": 1.0, "moonpool_decode": 3.0})
    own = located(planned["decode-1"], host, target="10.0.0.2:0", pool="10.0.0.2:7001", gpus=0.0, is_only_host=False)
    assert [own[key] for key in ("listen", "data_host", "pool", "conductor", "node_id")] == [
        "10.0.0.2:0",
        "10.0.0.2",
        "10.0.0.2:7001",
        ["10.0.0.1:7000"],
        "decode-1",
    ]
    assert own["threads"] == 2
    assert environment(planned["decode-1"], own)["OMP_NUM_THREADS"] == "2"
    pool = located(planned["pool-0"], host, target="10.0.0.2:7001", pool="", gpus=0.0, is_only_host=False)
    assert pool["listen"] == "10.0.0.2:7001"
    assert "pool" not in pool


def test_a_worker_with_a_gpu_takes_the_one_that_ray_shows_it() -> None:
    plan = plans(prefill_nodes=3)["prefill-2"]
    assert bundle_of(plan, gpus=1.0) == {"moonpool_prefill": 1.0, "GPU": 1.0}
    own = located(plan, RayHost("aa", "h", {"CPU": 8.0}), target="h:0", pool="p:1", gpus=1.0, is_only_host=False)
    assert (own["device"], own["worker_index"]) == ("cuda", 0)


EIGHT = RayHost("aa", "h", {"CPU": 64.0, "GPU": 8.0, "moonpool_prefill": 24.0, "moonpool_decode": 24.0})


@pytest.mark.parametrize(
    ("gpus", "on_device", "on_host"),
    [(0.0, 0, 48), (2.0, 1, 4), (1.0, 1, 8), (0.6, 1, 8), (0.5, 2, 16), (0.3, 3, 24), (0.1, 10, 48)],
)
def test_workers_divide_a_gpu_and_their_host_by_what_each_can_hold(gpus: float, on_device: int, on_host: int) -> None:
    plan = plans()["prefill-0"]
    own = located(plan, EIGHT, target="h:0", pool="p:1", gpus=gpus, is_only_host=False)
    assert (own["device_workers"], own["host_workers"]) == (on_device, on_host)


@pytest.mark.parametrize(("gpus", "on_device"), [(0.0, 0), (0.5, 2)])
def test_workers_of_a_ray_of_our_own_divide_the_host_as_planned(gpus: float, on_device: int) -> None:
    plan = plans(prefill_nodes=3, decode_nodes=2)["prefill-0"]
    host = RayHost("aa", "127.0.0.1", {"CPU": 64.0, "GPU": 8.0} | local_resources())
    own = located(plan, host, target="127.0.0.1:0", pool="p:1", gpus=gpus, is_only_host=True)
    assert (own["device_workers"], own["host_workers"], own["threads"]) == (on_device, 5, plan.settings["threads"])


def test_fractions_of_several_gpus_are_no_gpu_of_a_worker() -> None:
    workers = {"moonpool_prefill": 4.0, "moonpool_decode": 4.0, "moonpool_pool": 1.0}
    nodes = [{**NODES[0], "Resources": workers | {"GPU": 2.0}}]
    flags: dict[str, Any] = {"runtime": "ray", "ray_gpus": 0.6}
    assert wait_for_offer(config(prefill_nodes=1, decode_nodes=1, **flags), lambda: nodes) == 0.6
    assert wait_for_offer(config(prefill_nodes=2, decode_nodes=1, **flags), lambda: nodes) == 0  # on CPUs
    with pytest.raises(RayUnusable, match=r"GPU: 3 workers with 0\.6 each required, room for 2"):
        wait_for_offer(config(prefill_nodes=2, decode_nodes=1, device="cuda", **flags), lambda: nodes)


def test_gpus_of_hosts_without_workers_are_no_room() -> None:
    head = {**NODES[1], "Alive": True, "Resources": {"GPU": 8.0}}
    own = {**NODES[0], "Resources": {"moonpool_aggregated": 4.0, "moonpool_pool": 1.0, "GPU": 1.0}}
    with pytest.raises(RayUnusable, match="GPU: 2 workers with 1 each required, room for 1"):
        wait_for_offer(
            config(runtime="ray", prefill_nodes=0, decode_nodes=0, aggregated=2, device="cuda"), lambda: [head, own]
        )


def test_without_the_package_ray_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(RayUnusable, match=r"pip install 'moonpool\[ray\]'"),
        chosen_runtime(config(runtime="ray"), tmp_path, None),
    ):
        pass


@pytest.mark.parametrize("flags", [{"runtime": "ray"}, {"ray_address": "10.0.0.1:6379"}])
def test_an_address_implies_ray_which_decides_on_pool_nodes_itself(flags: dict[str, str]) -> None:
    assert config(**flags).runtime.is_ray
    with pytest.raises(Exception, match="--pool-nodes must be omitted"):
        config(pool_nodes=2, **flags)


def test_an_address_and_the_runtime_process_contradict_each_other() -> None:
    with pytest.raises(Exception, match="omit one of them"):
        config(runtime="process", ray_address="10.0.0.1:6379")


@pytest.mark.parametrize("flags", [{"ray_address": "h:1"}, {"runtime": "ray", "join": "c:1"}, {"join": "c:1"}])
def test_nodes_outlive_serve_only_in_a_ray_and_a_cluster_that_do(flags: dict[str, str]) -> None:
    assert config(ray_address="h:1", join="c:1", ray_orphan_grace=60).runtime.ray_orphan_grace_s == 60
    with pytest.raises(Exception, match="must be 0 or at least 30 s"):
        config(ray_address="h:1", join="c:1", ray_orphan_grace=5)
    with pytest.raises(Exception, match="--ray-orphan-grace needs --ray-address and --join"):
        config(ray_orphan_grace=60, **flags)


@pytest.mark.parametrize("address", ["auto", "ray://10.0.0.1:10001", "10.0.0.1", "unix:/tmp/ray"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(Exception, match="must be HOST:PORT"):
        config(ray_address=address)


def test_an_address_where_nobody_listens_is_named_at_once(tmp_path: Path) -> None:
    port = claim_port("127.0.0.1", 0)
    ray = config(ray_address=f"127.0.0.1:{port}")
    with (
        pytest.raises(RayUnusable, match=f"nothing answers at the Ray address .*{port}"),
        chosen_runtime(ray, tmp_path, None),
    ):
        pass
