"""The ids that the decision log gives to prefixes."""

import numpy as np
import pytest

from conductor.decision_log.records import Hashes
from conductor.policy.events import RequestCompleted

BLOCK = 16


def test_hash_ids_tell_equal_prefixes_and_nothing_else(chain):
    hashes = Hashes(b"secret", 512)
    keys = chain((1, 64))
    ids = hashes.ids(keys, BLOCK, 1024, "a")
    assert len(ids) == 2
    assert all(0 <= one < 2**53 for one in ids)
    assert hashes.ids(keys, BLOCK, 1024, "b") == ids
    assert Hashes(b"other", 512).ids(keys, BLOCK, 1024, "a") != ids
    # A tenant's salt is in the keys: other salt, other keys, no id in common.
    assert not set(hashes.ids(chain((2, 64)), BLOCK, 1024, "a")) & set(ids)
    # The last tokens have no key: nobody can say whether they are the same.
    assert hashes.ids(keys[:63], BLOCK, 1020, "a")[1] != hashes.ids(keys[:63], BLOCK, 1020, "b")[1]


@pytest.mark.parametrize("key_tokens", [1, 16, 48, 512, 700, 4096])
def test_an_equal_hash_id_always_means_an_equal_prefix(key_tokens):
    hashes = Hashes(b"s", 512)
    prompt_tokens = 5000
    one = np.arange(prompt_tokens // key_tokens, dtype=np.uint64)
    for split in range(0, len(one) + 1, max(1, len(one) // 7)):
        other = one.copy()
        other[split:] += np.uint64(1 << 40)
        mine, yours = (hashes.ids(keys, key_tokens, prompt_tokens, name) for keys, name in ((one, "a"), (other, "b")))
        assert len(set(mine)) == len(mine) == -(-prompt_tokens // 512)
        for number, (left, right) in enumerate(zip(mine, yours, strict=True)):
            end = min((number + 1) * 512, prompt_tokens)
            assert (left == right) == (end <= split * key_tokens), (number, split)


def test_hash_ids_stay_the_same_over_restarts(tmp_path, start, make, records, chain):
    for name in "ab":
        core = start(log={"decision_log_block_tokens": 64})
        core.handle(make.request(name, prompt=128), chain((1, 8)))
        core.handle(RequestCompleted(name, 0, "finished"))
        core.close()
    first, second = records()
    assert first["hash_ids"] == second["hash_ids"]
    assert (tmp_path / "log" / "log.json").stat().st_mode & 0o077 == 0
