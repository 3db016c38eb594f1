"""In which order files of tests begin. `make test` hands whole files to processes, in this order."""

from collections.abc import Iterable

LONGEST_FIRST = (
    "e2e/test_ray.py",
    "tools/prove/test_prove.py",
    "e2e/test_scale.py",
    "e2e/test_chaos.py",
    "e2e/test_kill.py",
    "e2e/test_live_matrix.py",
    "e2e/test_conversations.py",
    "moonpool/supervision/test_serve.py",
    "e2e/test_frozen.py",
    "e2e/test_network_faults.py",
    "e2e/test_rolling_upgrade.py",
    "e2e/test_openapi.py",
    "e2e/test_tokens.py",
    "e2e/test_encrypted.py",
    "e2e/test_pool_command.py",
    "tools/training/test_train.py",
    "simulator/test_serving_cluster.py",
    "simulator/test_serving_overload.py",
    "simulator/test_cache_simulation.py",
    "security/",
    "e2e/",
    "moonpool/chat/test_chat.py",
    "moonpool/transfer_bench/test_bench_messenger.py",
    "moonpool/commands/test_cli.py",
    "simulator/test_moonpool_policy.py",
    "loadtest/test_runner.py",
    "wheel/",
    "messenger/test_soak.py",
    "kvpool/ssd/test_ssd_kill.py",
)
"""Files of tests/ and folders that take from half a minute to a few seconds alone; all others take less."""


def order_of(files: Iterable[str]) -> dict[str, float]:
    """Where each file (as "e2e/test_ray.py") comes: the lower, the sooner.

    Long ones are spread among the short, since most wait for clusters that start while others compute; but the last of
    them begins when a third of the short ones is left, lest one process work on alone at the end.
    """
    known = sorted(set(files))
    rank = {file: next((n for n, long in enumerate(LONGEST_FIRST) if file.startswith(long)), None) for file in known}
    long = sorted((file for file in known if rank[file] is not None), key=lambda file: rank[file] or 0)
    short = [file for file in known if rank[file] is None]
    return {file: n / len(long) * 2 / 3 for n, file in enumerate(long)} | {
        file: n / len(short) for n, file in enumerate(short)
    }
