"""The choice between plain and coded blocks."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.compression import MARGIN, CompressionPolicy, LoadCosts, SmoothedPace, Storage

NS, OTHER = b"n" * 16, b"o" * 16
GIB = 1 << 30
seconds = st.floats(1e-12, 1e-6)


def measured(
    io_s: float, decode_s: float, ratio: float, verify_s: float = 0.0, batches: float = 1.0
) -> CompressionPolicy:
    """A policy after measurements of these seconds per byte."""
    policy = CompressionPolicy()
    policy.io.add(GIB, GIB * io_s)
    policy.verify.add(GIB, GIB * verify_s)
    policy.coded(NS, GIB, int(GIB * ratio))
    policy.decoded(NS, GIB, GIB * decode_s)
    for _ in range(200):
        policy.loaded(batches)
    return policy


@given(seconds, seconds, seconds, st.floats(0.01, 1.0), st.floats(1, 100))
def test_a_block_is_coded_only_if_its_load_is_predicted_to_be_faster(
    io_s: float, verify_s: float, decode_s: float, ratio: float, batches: float
) -> None:
    policy = measured(io_s, decode_s, ratio, verify_s, batches)
    costs = policy.costs(NS)
    assert costs is not None
    plain_s, coded_s = costs.load_s(Storage.PLAIN), costs.load_s(Storage.CODED)
    if policy.choose(NS) is Storage.CODED:
        assert coded_s < plain_s * (1 - MARGIN) * (1 + 1e-9)
    else:
        assert coded_s >= plain_s * (1 - MARGIN) * (1 - 1e-9)


@given(seconds, seconds, seconds, st.floats(0.01, 1.0), st.floats(1, 100), st.floats(1, 10))
def test_a_slower_disk_never_makes_plain_blocks_preferable(
    io_s: float, verify_s: float, decode_s: float, ratio: float, batches: float, slower: float
) -> None:
    def gain(io_s: float) -> float:
        costs = LoadCosts(io_s, verify_s, decode_s, ratio, batches)
        return costs.load_s(Storage.PLAIN) - costs.load_s(Storage.CODED)

    assert gain(io_s * slower) >= gain(io_s) - 1e-15


def test_slow_disks_get_coded_blocks_and_fast_ones_plain_blocks() -> None:
    assert measured(io_s=1 / 200e6, decode_s=1 / 1e9, ratio=0.7).choose(NS) is Storage.CODED
    assert measured(io_s=1 / 5e9, decode_s=1 / 1e9, ratio=0.7).choose(NS) is not Storage.CODED


def test_overlapping_batches_hide_the_decoding() -> None:
    assert measured(io_s=1 / 700e6, decode_s=1 / 1e9, ratio=0.7, batches=1).choose(NS) is not Storage.CODED
    assert measured(io_s=1 / 700e6, decode_s=1 / 1e9, ratio=0.7, batches=20).choose(NS) is Storage.CODED


def test_before_the_disk_was_measured_the_first_block_is_a_trial_and_the_others_are_plain() -> None:
    policy = CompressionPolicy()
    assert policy.choose(NS) is Storage.TRIAL
    policy.coded(NS, 1 << 16, 1 << 15)
    policy.decoded(NS, 1 << 16, 1e-4)
    assert {policy.choose(NS) for _ in range(50)} == {Storage.PLAIN}
    policy.io.add(1 << 20, 1.0)
    assert policy.choose(NS) is Storage.CODED
    assert policy.choose(OTHER) is Storage.TRIAL


def test_trials_go_on_while_blocks_are_stored_plain_so_that_changes_are_noticed() -> None:
    policy = measured(io_s=1 / 200e6, decode_s=1 / 1e9, ratio=1.0)
    chosen = [policy.choose(NS) for _ in range(260)]
    assert chosen.count(Storage.TRIAL) == 4
    assert Storage.CODED not in chosen
    for _ in range(2000):
        policy.coded(NS, 1 << 16, 1 << 15)
    assert policy.choose(NS) is Storage.CODED


def test_a_pace_forgets() -> None:
    pace = SmoothedPace(half_nbytes=1000)
    pace.add(1 << 20, 1.0)
    for _ in range(100):
        pace.add(1000, 2e-6)
    assert 1e-9 < pace.per_byte_s < 3e-9
