"""KV in int8: how far off it is, how much room it takes, what it refuses, and that it is never taken for exact KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import load_model
from kvpool import KvGroup, KvPoolError, KvSpec, Provenance, kv_namespace
from messenger import Messenger, MessengerConfig
from settings.keys import assemble
from worker.config import WorkerConfig
from worker.errors import StartupError
from worker.kv_memory import KvMemory, QuantisedMemory, quantised_spec
from worker.transformer import Transformer

MODEL = Path(__file__).parents[1] / "data" / "nano-model"
SLOTS = [5, 0, 3]


@pytest.fixture
def memories() -> Iterator[tuple[KvMemory, QuantisedMemory]]:
    messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
    messenger.start()
    exact = KvMemory(load_model(MODEL), messenger, num_slots=8, block_tokens=4)
    stored = QuantisedMemory(exact, messenger, num_slots=8)
    yield exact, stored
    stored.close()
    exact.close()
    messenger.close()


def fill(exact: KvMemory, scale: float = 1.0) -> list[torch.Tensor]:
    """Random KV in every slot; returns copies, per group."""
    generator = torch.Generator().manual_seed(1)
    for g in range(exact.num_groups):
        values = exact.slot_values(g)
        values.copy_(torch.randn(values.shape, generator=generator) * scale)
    return [exact.slot_values(g).clone() for g in range(exact.num_groups)]


def test_a_group_that_does_not_divide_a_head_is_refused_by_its_flag() -> None:
    config = assemble(
        WorkerConfig, node_id="w", listen="unix:w.sock", conductor_targets=(), pool_target="", model=MODEL, threads=1,
        device="cpu", kv_dtype="int8", kv_int8_group=5,
    )  # fmt: skip
    with pytest.raises(
        StartupError, match=r"--kv-int8-group \(kv_scale_group\) must divide .*, got 5: use one of 1, 2"
    ):
        Transformer.of(config)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4])
def test_values_come_back_within_half_a_step_of_their_group(memories, scale):
    exact, stored = memories
    before = fill(exact, scale)
    stored.to_host_now(SLOTS)
    for g in range(exact.num_groups):
        exact.slot_values(g).zero_()
    stored.to_device_now(SLOTS)
    for g, group in enumerate(stored.spec.groups):
        shape = (*before[g].shape[:-1], -1, group.scale_group)
        want, got = (
            before[g][SLOTS].reshape(len(SLOTS), *shape[1:]),
            exact.slot_values(g)[SLOTS].reshape(len(SLOTS), *shape[1:]),
        )
        # Half a step of int8; a float16 scale is itself off by 2**-11, or, below 6e-5, by 3e-8 of a step's 127.
        step = want.abs().amax(dim=-1, keepdim=True) / 127
        assert ((want - got).abs() <= step * 0.57 + 127 * 3.1e-8).all()
        others = [slot for slot in range(8) if slot not in SLOTS]
        assert (exact.slot_values(g)[others] == 0).all()


def test_no_slots_are_nothing_to_do(memories):
    exact, stored = memories
    before = fill(exact)
    stored.to_host_now([])
    stored.to_device_now([])
    assert all(torch.equal(exact.slot_values(g), values) for g, values in enumerate(before))


def test_the_same_kv_gives_the_same_bytes_and_digests(memories):
    exact, stored = memories
    fill(exact)
    valid = np.array([4, 2, 4], np.int32)
    stored.to_host_now(SLOTS)
    first = [stored.slot_digests(g, SLOTS, valid) for g in range(stored.num_groups)]
    stored.to_host_now(SLOTS)
    assert all((stored.slot_digests(g, SLOTS, valid) == want).all() for g, want in enumerate(first))
    exact.slot_values(0)[3] += 1
    stored.to_host_now(SLOTS)
    assert (stored.slot_digests(0, SLOTS, valid)[2] != first[0][2]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e7 * 127])
def test_values_that_int8_cannot_stand_for_are_refused(memories, bad):
    exact, stored = memories
    fill(exact)
    exact.slot_values(0)[3, 0, 0, 1, 2, 0] = bad
    with pytest.raises(KvPoolError, match="must be finite and small enough"):
        stored.to_host_now(SLOTS)
    stored.to_host_now([0, 5])


@pytest.mark.parametrize(
    ("head_dim", "scale_group", "row_nbytes"),
    [(128, 64, 132), (64, 32, 68), (32, 16, 36), (96, 48, 100), (6, 3, 10), (7, 7, 9), (256, 64, 264)],
)
def test_a_row_takes_a_byte_a_value_and_two_a_scale(head_dim, scale_group, row_nbytes):
    spec = quantised_spec(KvSpec((KvGroup("full", 0, (0, 1), 2, head_dim, "float16"),), 16))
    assert spec.groups[0].scale_group == scale_group
    assert spec.token_row_nbytes(0) == row_nbytes
    assert spec.block_nbytes == 2 * 2 * 2 * 16 * row_nbytes


def test_its_namespace_is_never_that_of_exact_kv():
    exact = KvSpec((KvGroup("full", 0, (0, 1), 2, 64, "float16"),), 16)
    stored = quantised_spec(exact)
    names = {
        kv_namespace("weights", exact),
        kv_namespace("weights", stored),
        kv_namespace("weights", stored, Provenance.QUANTISED),
        kv_namespace("weights", KvSpec((KvGroup("full", 0, (0, 1), 2, 64, "int8"),), 16), Provenance.QUANTISED),
    }
    assert len(names) == 4


def test_its_spec_goes_over_the_wire_and_into_state_and_back():
    stored = quantised_spec(KvSpec((KvGroup("window", 8, (0, 1), 2, 64, "float16"),), 16))
    assert KvSpec.from_proto(stored.to_proto()) == stored
    assert KvSpec.from_json(stored.to_json()) == stored
