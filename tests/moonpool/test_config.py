import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moonpool.config import (
    COMPOSITES,
    ConductorRole,
    FrontendRole,
    PoolNodeRole,
    ServeConfig,
    WorkerRole,
    all_settings,
    composite_settings,
    flatten,
    load,
)
from moonpool.errors import ConfigError, UnknownKey
from moonpool.role_configs import conductor_config, frontend_config, pool_node_config, worker_config
from settings.keys import InvalidSetting, composite_groups, group_settings, parse_size


def loaded(
    composite: type = ServeConfig,
    *,
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    config_file: Path | None = None,
) -> Any:
    return load(composite, flags=flags or {}, environ=environ or {}, config_file=config_file, known=all_settings())


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("port: 1111\nhost: 10.0.0.1\nttft_slo: 2\n")
    return path


def test_defaults_alone_are_a_valid_configuration() -> None:
    config = loaded()
    assert (config.topology.num_prefill, config.topology.num_decode, config.http.port) == (1, 1, 8000)


def test_the_environment_wins_over_the_file_and_flags_over_both(config_file: Path) -> None:
    environ = {"MOONPOOL_PORT": "2222", "MOONPOOL_HOST": "10.0.0.2", "PATH": "/bin"}
    config = loaded(flags={"port": "3333", "host": None}, environ=environ, config_file=config_file)
    assert config.http.port == 3333
    assert config.http.host == "10.0.0.2"
    assert config.policy.ttft_slo_s == 2.0


def test_the_environment_can_name_the_file(config_file: Path) -> None:
    assert loaded(environ={"MOONPOOL_CONFIG": str(config_file)}).http.port == 1111


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 80", r"unknown key 'prot'; did you mean port\?"),
        ("prefill-nodes: 2", r"unknown key 'prefill-nodes'; did you mean prefill_nodes\?"),
        ("zzzzzz: 1", r"unknown key 'zzzzzz'; see `moonpool config`"),
        ("port: 80\nport: 81", "the key 'port' is given twice"),
        ("- port", "must contain `key: value` lines"),
        ("port: [", "is not valid YAML"),
        ("port: 70000", r"cluster.yaml: port must be from 0 to 65535, got 70000"),
        ("port: true", r"port must be an integer, got True"),
        ("port: 1.5", r"port must be an integer, got 1.5"),
        ("transport: ucx", r"transport must be one of auto, rdma, tcp, shm, got 'ucx'"),
        ("api_key: [1]", r"api_key must be a list of strings, got \[1\]"),
        ("port: null", r"port must be an integer, got None"),
        pytest.param("ttft_slo: 1" + 400 * "0", r"ttft_slo must be a smaller number", id="huge"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        loaded(config_file=path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere.yaml"):
        loaded(config_file=tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MOONPOOL_PROT", "1", r"unknown environment variable MOONPOOL_PROT; did you mean MOONPOOL_PORT\?"),
        ("MOONPOOL_PORT", "many", r"MOONPOOL_PORT must be an integer, got 'many'"),
        ("MOONPOOL_TTFT_SLO", "nan", r"MOONPOOL_TTFT_SLO must be a finite number, got 'nan'"),
        ("MOONPOOL_VERBOSE", "maybe", r"MOONPOOL_VERBOSE must be true or false, got 'maybe'"),
        ("MOONPOOL_POOL_BYTES", "much", r"MOONPOOL_POOL_BYTES must be a number of bytes, .* got 'much'"),
        (
            "MOONPOOL_RUN_DIR",
            "~nobody.at.all/x",
            r"MOONPOOL_RUN_DIR must not name the home directory of an unknown user, got '~nobody.at.all/x'",
        ),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(environ={variable: text})


def test_the_time_outs_of_operators_reach_who_keeps_them() -> None:
    environ = {"MOONPOOL_REPORT_TIMEOUT": "9", "MOONPOOL_HOLD_OFF": "0.5", "MOONPOOL_PUSH_TIMEOUT": "4"}
    flags = {"conductor": "head:7000", "pool": "here:7001"}
    assert conductor_config(loaded(ConductorRole, environ=environ), "c").policy.report_timeout_s == 9
    assert (
        frontend_config(loaded(FrontendRole, flags={"conductor": "x:1"}, environ=environ), "f").http.hold_off_s == 0.5
    )
    assert worker_config(loaded(WorkerRole, flags=flags, environ=environ), "w").kv.push_timeout_s == 4
    assert conductor_config(loaded(ConductorRole, flags={"report_timeout": "0"}), "c").policy.report_timeout_s == 0
    with pytest.raises(
        ConfigError, match=r"--report-timeout must be at least 2, since nodes report every second, .* got 1\.5"
    ):
        loaded(flags={"report_timeout": "1.5"})


def test_an_unknown_key_is_its_own_error() -> None:
    with pytest.raises(UnknownKey):
        loaded(environ={"MOONPOOL_PROT": "1"})


def test_a_role_passes_over_the_keys_of_others_in_a_shared_file(config_file: Path) -> None:
    flags = {"conductor": "head:7000", "pool": "here:7001"}
    config = loaded(WorkerRole, flags=flags, environ={"MOONPOOL_PORT": "5"}, config_file=config_file)
    assert config.conductor.conductor == ("head:7000",)


def test_a_worker_without_a_conductor_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="--conductor is required"):
        loaded(WorkerRole, flags={"pool": "here:7001"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill_nodes": "0", "decode_nodes": "2"}, "must both be at least 1 or both 0, got 0 and 2"),
        ({"prefill_nodes": "0", "decode_nodes": "0"}, "the cluster must have workers"),
        ({"transport": "shm", "pool_nodes": "2"}, "hosts without shared memory"),
        ({"data_host": "0.0.0.0"}, "--data-host must be an address .* got the wildcard '0.0.0.0'"),
        (
            {"capacity_tokens": "1000", "block_tokens": "16"},
            r"multiple of block_tokens \(16\), for example 1008, got 1000",
        ),
        ({"device": "tpu"}, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cuda:"}, "--device must be .* got 'cuda:'"),
        ({"api_key": ["a", ""]}, "--api-key must not be empty"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(flags=flags)


def _required(composite: type) -> dict[str, str]:
    """Return the required settings of a pool node or a worker."""
    return {"conductor": "head:7000"} | ({"pool": "here:7001"} if composite is WorkerRole else {})


@pytest.mark.parametrize("composite", [PoolNodeRole, WorkerRole])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"listen": "0.0.0.0:7002"}, r"--listen with the wildcard '0.0.0.0:7002' needs --advertise host:port"),
        ({"listen": "[::]:0"}, "--listen with the wildcard"),
        (
            {"listen": "0.0.0.0:0", "advertise": "0.0.0.0:7002"},
            "--advertise must be .* got the wildcard '0.0.0.0:7002'",
        ),
        ({"advertise": "10.0.0.2"}, r"--advertise must be host:port or unix:/path, got '10.0.0.2'"),
        ({"data_host": "0.0.0.0"}, "--data-host with the wildcard '0.0.0.0' needs --data-advertise"),
        ({"data_host": "::", "data_advertise": "::"}, "--data-advertise must be .* got the wildcard '::'"),
        ({"data_port": "65536"}, "--data-port must be from 0 to 65535, got 65536"),
    ],
)
def test_an_address_that_others_cannot_dial_is_refused(composite: type, flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(composite, flags=flags | _required(composite))


def test_a_conductor_may_listen_at_a_wildcard() -> None:
    assert loaded(ConductorRole, flags={"listen": "0.0.0.0:7000"}).listen.listen == "0.0.0.0:7000"


def test_a_wildcard_data_host_that_shared_memory_does_not_use_is_no_fault() -> None:
    flags = {"conductor": "head:7000", "data_host": "0.0.0.0", "transport": "shm"}
    assert loaded(PoolNodeRole, flags=flags).transport.data_host == "0.0.0.0"


@pytest.mark.parametrize(("composite", "make"), [(PoolNodeRole, pool_node_config), (WorkerRole, worker_config)])
def test_advertised_addresses_and_the_data_port_reach_the_node(
    composite: type, make: Callable[[Any, str], Any], short_path: Path
) -> None:
    flags = {"listen": "0.0.0.0:7002", "advertise": "10.0.0.2:17002", "data_host": "0.0.0.0"}
    flags |= {"data_port": "7003", "data_advertise": "10.1.0.2", "socket_dir": str(short_path)}
    config = make(loaded(composite, flags=flags | _required(composite)), "n")
    assert (config.listen.listen, config.host.advertise) == ("0.0.0.0:7002", "10.0.0.2:17002")
    messenger = config.messenger
    assert (messenger.transport.data_host, messenger.host.data_port, messenger.host.data_advertise) == (
        "0.0.0.0",
        7003,
        "10.1.0.2",
    )


def test_aggregated_workers_replace_the_default_split() -> None:
    topology = loaded(flags={"aggregated": "2"}).topology
    assert (topology.num_prefill, topology.num_decode, topology.num_engines) == (0, 0, 2)


def test_a_group_made_directly_is_checked_too() -> None:
    group = composite_groups(ServeConfig)["http"]
    with pytest.raises(InvalidSetting, match="port must be from 0 to 65535, got -1"):
        group(port=-1)  # type: ignore[call-arg]


def test_no_key_is_declared_twice() -> None:
    groups = {cls for composite in COMPOSITES for cls in composite_groups(composite).values()}
    groups -= {cls for cls in groups if cls.__base__ in groups}  # with the keys of another group
    names = [name for cls in groups for name in group_settings(cls)]
    assert len(names) == len(set(names))


def test_every_key_has_one_line_of_help_and_a_valid_default() -> None:
    for declared in all_settings().values():
        assert declared.key.help
        assert "\n" not in declared.key.help


def test_what_flatten_gives_loads_back_to_the_same(tmp_path: Path) -> None:
    flags = {"port": "81", "api_key": ["a", "b"], "run_dir": str(tmp_path), "pool_bytes": "2GiB", "prefill_nodes": "3"}
    config = loaded(flags={**flags, "decode_nodes": "1"})
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(flatten(config)))
    assert loaded(config_file=path) == config


@pytest.mark.parametrize("key", ["colocated_prefill", "undivided"])
def test_a_setting_may_be_given_by_its_earlier_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{key}: act\n")
    expected = loaded(flags={"colocated_prefill": "act"})
    assert expected.policy.colocated_prefill == "act"
    assert loaded(flags={key: "act"}) == expected
    assert loaded(environ={f"MOONPOOL_{key.upper()}": "act"}) == expected
    assert loaded(config_file=path) == expected


def test_an_earlier_name_keeps_the_order_of_the_sources(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("colocated_prefill: advise\n")
    assert loaded(flags={"undivided": "act"}, config_file=path).policy.colocated_prefill == "act"
    path.write_text("undivided: advise\n")
    assert loaded(environ={"MOONPOOL_COLOCATED_PREFILL": "act"}, config_file=path).policy.colocated_prefill == "act"


def test_one_source_may_not_give_a_setting_under_two_names(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("undivided: act\ncolocated_prefill: act\n")
    with pytest.raises(
        ConfigError, match=r"yaml: undivided and .*yaml: colocated_prefill are two names of one setting"
    ):
        loaded(config_file=path)
    with pytest.raises(ConfigError, match="MOONPOOL_UNDIVIDED and MOONPOOL_COLOCATED_PREFILL are two names"):
        loaded(environ={"MOONPOOL_UNDIVIDED": "act", "MOONPOOL_COLOCATED_PREFILL": "off"})
    with pytest.raises(ConfigError, match=r"--undivided and --colocated-prefill are two names.*: omit --undivided"):
        loaded(flags={"undivided": "act", "colocated_prefill": "off"})


def test_an_error_names_the_earlier_name_that_was_given() -> None:
    with pytest.raises(ConfigError, match=r"--undivided must be .* got 'maybe'"):
        loaded(flags={"undivided": "maybe"})


@given(st.sampled_from(sorted(composite_settings(ServeConfig))), st.text(max_size=20))
def test_any_text_for_any_key_loads_or_is_a_configuration_error(key: str, text: str) -> None:
    with contextlib.suppress(ConfigError):
        loaded(environ={f"MOONPOOL_{key.upper()}": text})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1024", 1024), ("1KiB", 1024), ("1kB", 1000), ("1.5 GiB", 3 << 29), ("2g", 2 << 30), ("3B", 3)],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(0, 1 << 60))
def test_a_plain_number_of_bytes_is_read_to_within_a_float(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == pytest.approx(nbytes)
