"""The keys of the pool's tiers: from flags to each pool node's own configuration."""

from pathlib import Path
from typing import Any

import pytest

from moonpool.config import PoolNodeRole, ServeConfig, all_settings, load
from moonpool.errors import ConfigError
from moonpool.plan import Planner
from moonpool.role_configs import pool_node_config


def loaded(composite: type = ServeConfig, **flags: Any) -> Any:
    return load(composite, flags=flags, environ={}, config_file=None, known=all_settings())


def nodes(tmp_path: Path, **flags: Any) -> list[Any]:
    """The configurations of the pool nodes that `serve` starts with these flags."""
    planned = Planner(loaded(**flags), run_dir=tmp_path, port=1, cores=1).cluster()
    roles = {
        plan.node_id: load(
            PoolNodeRole,
            flags={key: value for key, value in plan.settings.items() if value is not None},
            environ={},
            config_file=None,
            known=all_settings(),
        )
        for plan in planned
        if plan.role == "pool-node"
    }
    return [pool_node_config(role, node_id) for node_id, role in roles.items()]


def test_each_pool_node_has_a_folder_of_its_own(short_path: Path) -> None:
    first, second = nodes(short_path, pool_nodes="2", pool_ssd_dir="/mnt/nvme", pool_bytes="1GiB")
    assert (first.ssd_folder, second.ssd_folder) == (Path("/mnt/nvme/pool-0"), Path("/mnt/nvme/pool-1"))
    assert first.pool.ssd_bytes == second.limits.ssd_nbytes == 4 << 30
    (sized,) = nodes(short_path, pool_ssd_dir="/mnt/nvme", pool_ssd_bytes="1TiB", pool_ssd_depth="32")
    assert (sized.pool.ssd_bytes, sized.pool.pool_ssd_depth) == (1 << 40, 32)


def test_without_a_folder_there_is_no_ssd_tier(short_path: Path) -> None:
    (node,) = nodes(short_path)
    assert (node.ssd_folder, node.pool.ssd_bytes) == (None, 0)
    with pytest.raises(ConfigError, match="give it with --pool-ssd-dir"):
        loaded(pool_ssd_bytes="1GiB")


def test_what_pages_the_memory_is_made_of_reaches_the_node(short_path: Path) -> None:
    (node,) = nodes(short_path, pool_hugepages="on")
    assert node.pool.pool_hugepages == "on"
    (node,) = nodes(short_path)
    assert node.pool.pool_hugepages == "auto"
    with pytest.raises(ConfigError, match="--pool-hugepages"):
        loaded(pool_hugepages="2MiB")


def test_policy_and_quotas_reach_the_node(short_path: Path) -> None:
    (node,) = nodes(short_path, pool_policy="arc", pool_quota=[f"{'ab' * 16}=0.25", f"{'cd' * 16}=1"])
    assert node.limits.policy == "arc"
    assert node.limits.quotas == {b"\xab" * 16: 0.25, b"\xcd" * 16: 1.0}
    with pytest.raises(ConfigError, match="--pool-policy"):
        loaded(pool_policy="random")


def test_shares_of_retention_reach_the_node(short_path: Path) -> None:
    (node,) = nodes(short_path, pool_retained_share="0.4", pool_retained_tenant_share="0.1")
    assert (node.limits.retained_share, node.limits.retained_tenant_share) == (0.4, 0.1)
    (node,) = nodes(short_path)
    assert (node.limits.retained_share, node.limits.retained_tenant_share) == (0.75, 0.5)


@pytest.mark.parametrize("key", ["pool_retained_share", "pool_retained_tenant_share"])
@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "half"])
def test_a_share_of_retention_that_cannot_be_is_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key.replace("_", "[-_]")):
        loaded(**{key: value})


@pytest.mark.parametrize("entry", ["half", "ab=0.5", f"{'ab' * 16}=0", f"{'ab' * 16}=1.5", f"{'zz' * 16}=0.5", "=1"])
def test_a_quota_that_cannot_be_is_named(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"--pool-quota must be NAMESPACE=SHARE"):
        loaded(pool_quota=[entry])


def test_parity_of_rounded_kv_is_refused():
    with pytest.raises(ConfigError, match="conflicts with --kv-storage int8"):
        loaded(kv_storage="int8", kv_parity_sample=0.5)


def test_settings_that_kv_in_int8_conflicts_with_are_named():
    with pytest.raises(ConfigError, match="--kv-parity-sample conflicts with --kv-dtype int8"):
        loaded(kv_dtype="int8", kv_parity_sample=0.5)
    with pytest.raises(ConfigError, match="--kv-int8-group is for --kv-dtype int8, got --kv-dtype auto"):
        loaded(kv_int8_group=8)
