"""How traffic goes, and how it is encrypted: from keys to what the messenger is given."""

from pathlib import Path
from typing import Any

import pytest

from messenger import MessengerConfig
from moonpool.config import PoolNodeRole, ServeConfig, WorkerRole, all_settings, load
from moonpool.errors import ConfigError
from moonpool.role_configs import pool_node_config, worker_config
from rpc.tls import TlsFiles
from settings.keys import InvalidSetting, assemble


def loaded(composite: type, flags: dict[str, Any]) -> Any:
    return load(composite, flags=flags, environ={}, config_file=None, known=all_settings())


@pytest.mark.parametrize(("composite", "make"), [(PoolNodeRole, pool_node_config), (WorkerRole, worker_config)])
def test_the_keys_reach_the_messenger(composite: type, make: Any, short_path: Path) -> None:
    flags = {"transport": "tcp", "streams_per_peer": "3", "max_connections_per_peer": "5", "conductor": "h:1"}
    flags |= {"tls_cert": "c.pem", "tls_key": "k.pem", "tls_ca": "ca.pem", "tls_name": "farm", "pool": "h:2"}
    flags |= {"rdma_silence": "2.5"}
    lists = {"rdma_devices": ["mlx5_0", "mlx5_1"]}
    own = {key: value for key, value in flags.items() if key != "pool" or composite is WorkerRole}
    config = make(loaded(composite, own | lists | {"socket_dir": str(short_path)}), "n").messenger
    transport = config.transport
    assert (transport.transport, transport.streams_per_peer, transport.max_connections_per_peer) == ("tcp", 3, 5)
    assert (transport.rdma_devices, transport.rdma_silence_s) == (("mlx5_0", "mlx5_1"), 2.5)
    assert config.tls_files == TlsFiles(Path("c.pem"), Path("k.pem"), Path("ca.pem"), "farm")


@pytest.mark.parametrize(("device", "gpu"), [("cpu", None), ("cuda:3", 3)])
def test_a_worker_wants_the_adapters_nearest_to_its_gpu(device: str, gpu: int | None, short_path: Path) -> None:
    flags = {"conductor": "h:1", "pool": "h:2", "device": device, "socket_dir": str(short_path)}
    assert worker_config(loaded(WorkerRole, flags), "n").messenger.gpu == gpu


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"tls_cert": "c.pem"},
            "tls_key, tls_ca must be set, too: encryption needs all of tls_cert, tls_key and tls_ca",
        ),
        ({"tls_cert": "c.pem", "tls_key": "k.pem"}, "tls_ca must be set"),
        ({"tls_name": " "}, "--tls-name must not be empty"),
        (
            {"streams_per_peer": "4", "max_connections_per_peer": "3"},
            r"must be at most max_connections_per_peer \(3\), got 4",
        ),
        ({"rdma_silence": "0"}, "--rdma-silence must be from 0.5 to 600, got 0.0"),
        ({"rdma_devices": ["mlx5_0", "mlx5_0"]}, r"rdma_devices must be distinct names, .* got \['mlx5_0', 'mlx5_0'\]"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(ServeConfig, flags)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tls_cert": Path("c.pem")},
        {"streams_per_peer": 4, "max_connections_per_peer": 3},
        {"transport": "ucx"},
        {"rdma_silence_s": 0.0},
        {"rdma_silence_s": 1e300},
        {"rdma_silence_s": float("nan")},
    ],
)
def test_a_messenger_refuses_them_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        assemble(MessengerConfig, **wrong)
