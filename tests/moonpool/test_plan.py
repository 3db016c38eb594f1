from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from conductor.policy.objectives import ObjectiveBook, configured_record
from moonpool.config import ConductorRole, FrontendRole, ServeConfig, WorkerRole, all_settings, load
from moonpool.plan import Planner, RolePlan, describe
from moonpool.role_configs import conductor_config, frontend_config
from moonpool.role_process.roles import ROLES
from moonpool.runtime.processes import child_plan
from moonpool.supervision.child import ChildPlan
from moonpool.supervision.run_dir import LONGEST_SOCKET_NAME

RUN_DIR = Path("/run/moonpool-test")


def config(**flags: Any) -> ServeConfig:
    given = {key: str(value) for key, value in flags.items()}
    return load(ServeConfig, flags=given, environ={}, config_file=None, known=all_settings())


def plans(cores: int = 8, **flags: Any) -> dict[str, Any]:
    planned = Planner(config(**flags), run_dir=RUN_DIR, port=8123, cores=cores).cluster()
    return {plan.node_id: plan for plan in planned}


def command(plan: RolePlan, folder: Path) -> ChildPlan:
    return child_plan(plan.node_id, plan.role, plan.settings, plan.env, folder)


def test_the_default_cluster_is_one_of_each() -> None:
    planned = plans()
    assert list(planned) == ["conductor", "pool-0", "prefill-0", "decode-0", "frontend"]
    assert [plan.tier for plan in planned.values()] == [0, 1, 2, 2, 3]
    assert describe(config()) == "1 prefill, 1 decode, 1 pool node"


def test_who_joins_a_cluster_plans_neither_conductor_nor_frontend() -> None:
    planned = plans(join="10.0.0.8:7000,10.0.0.9:7000", decode_nodes=2)
    assert list(planned) == ["pool-0", "prefill-0", "decode-0", "decode-1"]
    assert {tuple(plan.settings["conductor"]) for plan in planned.values()} == {("10.0.0.8:7000", "10.0.0.9:7000")}


def test_workers_that_run_already_are_kept_and_new_ones_have_ids_beyond_theirs() -> None:
    joined = config(join="10.0.0.1:7000", runtime="ray", prefill_nodes=1, decode_nodes=3)
    planner = Planner(joined, run_dir=RUN_DIR, port=0, cores=8, conductor="10.0.0.1:7000")
    running = ("decode-10", "decode-2", "prefill-0", "prefill-3", "pool-7", "other-decode-5")
    planned = [plan.node_id for plan in planner.cluster(running)]
    assert planned == ["prefill-0", "prefill-3", "decode-2", "decode-10", "decode-11"]
    assert planner.next_worker("prefill").node_id == "prefill-4"
    assert planner.initial_counts() == {"prefill": 1, "decode": 3, "aggregated": 0}


def test_workers_take_turns_over_the_pool_nodes_and_share_their_host() -> None:
    planned = plans(prefill_nodes=2, decode_nodes=2, pool_nodes=2)
    for name in ("prefill", "decode"):
        for index in range(2):
            worker, pool = planned[f"{name}-{index}"], planned[f"pool-{index}"]
            assert worker.settings["pool"] == pool.target
            assert worker.settings["host_id"] == pool.settings["host_id"] != ""
    assert planned["pool-0"].settings["host_id"] != planned["pool-1"].settings["host_id"]


def test_with_one_pool_node_all_are_of_this_machine() -> None:
    assert {plan.settings.get("host_id", "") for plan in plans(decode_nodes=3).values()} == {""}


def test_on_one_machine_kv_uses_no_tcp_unless_it_is_asked_for() -> None:
    def transports(**flags: Any) -> set[str]:
        return {plan.settings["transport"] for plan in plans(**flags).values() if "transport" in plan.settings}

    assert transports() == transports(prefill_nodes=2, conductors=2) == transports(transport="auto") == {"shm"}
    assert transports(transport="tcp") == {"tcp"}
    assert transports(transport="rdma") == {"rdma"}
    assert transports(pool_nodes=2) == {"auto"}  # they stand for hosts
    assert transports(join="10.0.0.8:7000") == {"auto"}
    ray = config(runtime="ray")
    planned = Planner(ray, run_dir=RUN_DIR, port=1, cores=8, conductor="10.0.0.1:7000").cluster()
    assert {plan.settings["transport"] for plan in planned if "transport" in plan.settings} == {"auto"}


def test_the_cores_are_shared_by_the_engine_processes() -> None:
    planned = plans(cores=9, prefill_nodes=2, decode_nodes=2)
    assert planned["prefill-0"].settings["threads"] == 2
    assert planned["prefill-0"].env["OMP_NUM_THREADS"] == planned["prefill-0"].env["NUMBA_NUM_THREADS"] == "2"
    assert planned["prefill-0"].env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert planned["conductor"].env["OMP_NUM_THREADS"] == "1"
    assert plans(cores=1)["decode-0"].settings["threads"] == 1
    assert plans(cores=1, threads=3)["decode-0"].settings["threads"] == 3


def test_addresses_are_distinct_unix_sockets_in_the_run_directory() -> None:
    planned = plans(prefill_nodes=3, decode_nodes=3, pool_nodes=3)
    targets = Counter(plan.target for plan in planned.values())
    assert max(targets.values()) == 1
    assert all(target.startswith(f"unix:{RUN_DIR}/") for target in targets)
    told = [plan.settings["conductor"] for plan in planned.values() if "conductor" in plan.settings]
    assert told == [[planned["conductor"].target]] * 10


def test_every_node_is_told_of_all_conductors_and_each_of_them_keeps_files_of_its_own() -> None:
    flags: dict[str, Any] = {"conductors": 3, "state_dir": "/s", "decision_log": "/l/d.jsonl"}
    planned = plans(**flags)
    conductors = [plan for plan in planned.values() if plan.role == "conductor"]
    assert [plan.node_id for plan in conductors] == ["conductor", "conductor-1", "conductor-2"]
    targets = [plan.target for plan in conductors]
    assert len(set(targets)) == 3
    told = [plan.settings["conductor"] for plan in planned.values() if "conductor" in plan.settings]
    assert told == [targets] * 4
    assert [plan.settings["listen"] for plan in conductors] == targets
    assert [plan.settings["state_dir"] for plan in conductors] == ["/s", "/s/conductor-1", "/s/conductor-2"]
    assert len({plan.settings["decision_log"] for plan in conductors}) == 3


def test_a_log_in_the_working_directory_has_others_beside_it() -> None:
    planned = plans(conductors=2, decision_log=".")
    here = Path.cwd()
    assert planned["conductor-1"].settings["decision_log"] == str(here.parent / f"conductor-1-{here.name}")


def test_every_planned_role_starts_from_its_file_as_planned(tmp_path: Path) -> None:
    composites = {role.command: role.composite for role in ROLES}
    for plan in Planner(
        config(aggregated=1, prefill_nodes=1, decode_nodes=1), run_dir=RUN_DIR, port=1, cores=2
    ).cluster():
        child = command(plan, tmp_path)
        path = Path(child.argv[-1])
        assert path.stat().st_mode & 0o077 == 0, "the file may hold API keys"
        composite = composites[plan.role]
        loaded: Any = load(composite, flags={}, environ={}, config_file=path, known=all_settings())
        assert loaded.node.node_id == plan.node_id
        if composite is WorkerRole:
            assert loaded.engine.threads == plan.settings["threads"]


def test_the_frontend_gets_its_keys_and_the_chosen_port() -> None:
    settings = plans(api_key="secret", port=0)["frontend"].settings
    assert settings["port"] == 8123
    assert settings["api_key"] == ["secret"]
    assert yaml.safe_load(yaml.safe_dump(settings)) == settings


def test_no_argument_list_holds_an_api_key(tmp_path: Path) -> None:
    planned = Planner(config(api_key="secret"), run_dir=tmp_path, port=1, cores=1).cluster()
    assert not any("secret" in word for plan in planned for word in command(plan, tmp_path).argv)


def two_models(**flags: Any) -> ServeConfig:
    entry = "org/other:v2=/m/other,alias=o,aggregated=2,max_batch=4,ttft_slo=3"
    given = {"model": "/m/first", "served_model_name": ["first", "f"], "models": [entry], **flags}
    return load(ServeConfig, flags=given, environ={}, config_file=None, known=all_settings())


def test_each_model_has_workers_of_its_own_and_the_first_ones_keep_the_plain_names() -> None:
    planned = {plan.node_id: plan for plan in Planner(two_models(), run_dir=RUN_DIR, port=1, cores=8).cluster()}
    workers = {node_id: plan.model for node_id, plan in planned.items() if plan.model}
    assert workers == {
        "prefill-0": "first",
        "decode-0": "first",
        "org-other-v2-aggregated-0": "org/other:v2",
        "org-other-v2-aggregated-1": "org/other:v2",
    }
    first, other = planned["prefill-0"].settings, planned["org-other-v2-aggregated-1"].settings
    assert (first["model"], other["model"]) == ("/m/first", "/m/other")
    assert (first["served_model_name"], other["served_model_name"]) == (["first", "f"], ["org/other:v2", "o"])
    assert (first["max_batch"], other["max_batch"]) == (64, 4)
    assert first["threads"] == other["threads"] == 2, "the cores are shared by the workers of all models"
    assert (first["worker_index"], other["worker_index"]) == (0, 3)
    described = "first: 1 prefill, 1 decode; org/other:v2: 2 aggregated; 1 pool node"
    assert describe(two_models()) == described


def test_frontend_and_conductor_are_told_of_every_model(tmp_path: Path) -> None:
    planned = {plan.node_id: plan for plan in Planner(two_models(), run_dir=RUN_DIR, port=1, cores=1).cluster()}

    def settings_of(node_id: str, composite: type) -> Any:
        path = Path(command(planned[node_id], tmp_path).argv[-1])
        return load(composite, flags={}, environ={}, config_file=path, known=all_settings())

    frontend = frontend_config(settings_of("frontend", FrontendRole), "frontend")
    assert [(model.name, model.aliases, str(model.path)) for model in frontend.models] == [
        ("first", ("f",), "/m/first"),
        ("org/other:v2", ("o",), "/m/other"),
    ]
    policy = conductor_config(settings_of("conductor", ConductorRole), "conductor").policy
    book = ObjectiveBook(configured_record(policy))
    assert book.resolve("org/other:v2", "", "").ttft.seconds == 3.0
    assert book.resolve("first", "", "").ttft.is_off


def test_all_conductors_keep_objectives_in_one_folder_which_outlives_the_cluster_only_with_a_state_folder() -> None:
    def folders(**flags: str) -> list[str]:
        config = load(
            ServeConfig, flags={"conductors": "2", **flags}, environ={}, config_file=None, known=all_settings()
        )
        plans = Planner(config, run_dir=RUN_DIR, port=1, cores=1).cluster()
        return [plan.settings["slo_dir"] for plan in plans if plan.role == "conductor"]

    assert folders() == [f"{RUN_DIR}/objectives"] * 2
    assert folders(state_dir="/state") == ["/state/objectives"] * 2
    assert folders(state_dir="/state", slo_dir="/slo") == ["/slo"] * 2


def test_models_whose_names_shorten_alike_have_workers_of_different_names() -> None:
    names = ["a-very-long-name-1", "a-very-long-name-2", "x/y", "x:y", "///"]
    config = load(
        ServeConfig,
        flags={"models": [f"{name}=/m/{index}" for index, name in enumerate(names)]},
        environ={},
        config_file=None,
        known=all_settings(),
    )
    planned = [plan.node_id for plan in Planner(config, run_dir=RUN_DIR, port=1, cores=1).cluster() if plan.model]
    assert len(planned) == len(set(planned)) == 10
    assert planned[:2] == ["prefill-0", "decode-0"]
    assert max(len(node_id) for node_id in planned) <= LONGEST_SOCKET_NAME - len(".sock")
