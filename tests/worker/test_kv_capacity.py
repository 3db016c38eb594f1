"""`capacity_tokens` auto: the cache fills what is free, never more, and a host that is too small is an error."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LayerSpan, load_model
from engine.random_model import RandomModelSpec, write_random_model
from engine.step_memory import _measured
from messenger import Messenger, MessengerConfig
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED
from settings.keys import assemble
from tests.worker.sibling_reference import write_profile
from worker import kv_capacity
from worker.config import WorkerConfig
from worker.errors import StartupError
from worker.hidden_memory import HiddenMemory, hidden_spec
from worker.kv_capacity import MemoryBudget, fitting_blocks, slots_nbytes, with_capacity
from worker.kv_memory import KvMemory, QuantisedMemory
from worker.node import WorkerNode
from worker.policy import BatchLimits
from worker.slot_memory import spec_of
from worker.transformer import Transformer

BLOCK = 16
MIB = 1 << 20
LENGTH = 1024
LIMITS = BatchLimits(max_batch=4, chunk_tokens=64, block_tokens=BLOCK)
MANY = replace(LIMITS, max_batch=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    full = RandomModelSpec(layers=4, max_len=LENGTH)
    windowed = RandomModelSpec(family="gemma2", layers=4, max_len=LENGTH, window=64)
    return {
        "full": write_random_model(root / "full", full),
        "windowed": write_random_model(root / "windowed", windowed),
    }


@pytest.fixture
def messenger() -> Iterator[Messenger]:
    made = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
    made.start()
    yield made
    made.close()


def config_of(folder: Path, **options: Any) -> WorkerConfig:
    return assemble(
        WorkerConfig,
        **{
            "device": "cpu", "threads": 1, "node_id": "w", "listen": "unix:w.sock", "conductor_targets": (),
            "pool_target": "", "model": folder, "block_tokens": BLOCK, "capacity_tokens": None,
            "max_batch": LIMITS.max_batch, "prefill_chunk_tokens": LIMITS.chunk_tokens,
        } | options,
    )  # fmt: skip


def chosen(config: WorkerConfig) -> WorkerConfig:
    return with_capacity(config, Transformer.of(config), replace(LIMITS, max_batch=config.engine.max_batch))


def budget(usable_nbytes: int, *, step_nbytes: int = 0, nbytes: int = 1000) -> MemoryBudget:
    """Memory for one form of slots, of `nbytes` a block."""
    return MemoryBudget("on the moon", 2 * (usable_nbytes + step_nbytes), 0.5, (), step_nbytes, nbytes)


def test_the_blocks_are_as_many_as_the_smallest_memory_holds() -> None:
    assert budget(40_000).num_blocks(100, LIMITS) == 40
    assert budget(40_999).num_blocks(100, LIMITS) == 40
    assert budget(41_000, step_nbytes=5).num_blocks(100, LIMITS) == 41
    assert fitting_blocks([budget(40_500), budget(10_500)], BLOCK * 8, LIMITS) == 10


def test_the_blocks_are_no_more_than_a_full_batch_of_the_longest_sequences_uses() -> None:
    assert fitting_blocks([budget(10**9)], BLOCK * 9 - 1, LIMITS) == 36


def test_hosts_that_are_nearly_equal_get_the_same_capacity() -> None:
    limits = replace(LIMITS, max_batch=10**6)
    assert {fitting_blocks([budget(free)], BLOCK, limits) for free in range(1_008_000, 1_024_000, 500)} == {1008}


def test_too_little_memory_for_one_sequence_is_an_error_that_says_what_to_do() -> None:
    message = (
        "one sequence of 128 tokens needs 0 MiB on the moon, where 10 MiB are free and 0 MiB may be used "
        r"\(0.5 of them, less 5 MiB for steps\): lower --max-model-len .* or set --capacity-tokens"
    )
    with pytest.raises(StartupError, match=message):
        fitting_blocks([budget(7999, step_nbytes=5 * MIB)], BLOCK * 8, LIMITS)
    assert fitting_blocks([budget(8000)], BLOCK * 8, LIMITS) == 8


@pytest.mark.parametrize(
    ("model", "options"),
    [("full", {}), ("windowed", {}), ("full", {"kv_dtype": "int8"}), ("windowed", {"kv_storage": "int8"})],
)
def test_what_is_allocated_fits_and_a_little_more_would_not(
    folders: dict[str, Path],
    messenger: Messenger,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: dict[str, Any],
) -> None:
    free = 20 * MIB
    monkeypatch.setattr(kv_capacity, "host_free_nbytes", lambda: free)
    config = config_of(folders[model], **{"memory_fraction": 0.75, "max_batch": 64, **options})
    engine = Transformer.of(config)
    num_slots = with_capacity(config, engine, MANY).num_slots
    memory = engine.new_memory(messenger, num_slots=num_slots, block_tokens=BLOCK, limits=MANY)
    stored, _ = engine.new_stored(memory, messenger)
    nbytes = memory.nbytes + (stored.nbytes if stored is not memory else 0)
    steps = kv_capacity._largest_step(config, engine.model, LENGTH)
    assert isinstance(stored, QuantisedMemory) == ("kv_storage" in options)
    assert nbytes <= 0.75 * free - steps < nbytes * 1.1
    assert LENGTH // BLOCK < num_slots < 64 * LENGTH // BLOCK
    for each in {id(part): part for part in (stored, memory)}.values():
        each.close()


def test_slots_are_counted_as_they_are_allocated(folders: dict[str, Path], messenger: Messenger) -> None:
    for folder in folders.values():
        engine = Transformer.of(config_of(folder))
        memory = engine.new_memory(messenger, num_slots=200, block_tokens=BLOCK, limits=LIMITS)
        assert isinstance(memory, KvMemory)
        assert memory.cache.flat.nbytes == slots_nbytes(spec_of(engine.model.kv_groups, BLOCK), 200, LIMITS)
        memory.close()
    spec = hidden_spec((1, 3), 64, "float32", BLOCK)
    hidden = HiddenMemory(spec, 200, messenger)
    assert hidden.nbytes == slots_nbytes(spec, 200, LIMITS)
    hidden.close()


def test_room_is_left_for_the_hidden_states_of_siblings(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_capacity, "host_free_nbytes", lambda: 20 * MIB)
    plain = config_of(folders["full"], max_batch=64)
    other = write_random_model(tmp_path / "other", RandomModelSpec(layers=4, max_len=LENGTH, seed=1))
    models = [Transformer.of(config_of(folder)).model for folder in (folders["full"], other)]
    profile = write_profile(tmp_path / "profile.json", models[0], models[1], [LayerSpan(1, 2)])
    config = config_of(folders["full"], max_batch=64, reuse_profile=(str(profile),))
    assert chosen(config).num_slots < chosen(plain).num_slots


def test_workers_of_a_host_share_its_memory(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_capacity, "host_free_nbytes", lambda: 60 * MIB)
    alone, shared = (chosen(config_of(folders["full"], max_batch=64, num_host_workers=count)) for count in (1, 2))
    assert 0.35 < shared.num_slots / alone.num_slots < 0.5


@pytest.mark.parametrize(("staging", "share"), [("mirror", 0.25), ("direct", 0.9)])
def test_a_gpu_bounds_the_cache_and_the_host_its_mirror(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, staging: str, share: float
) -> None:
    config = config_of(folders["full"], max_batch=64, num_host_workers=2, kv_staging=staging)
    engine = Transformer.of(config)
    engine.model.device = torch.device("cuda:0")
    monkeypatch.setattr(kv_capacity, "host_free_nbytes", lambda: 40 * MIB)
    monkeypatch.setattr(kv_capacity, "step_nbytes", lambda *_, **__: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * MIB, 80 * MIB))
    num_slots = with_capacity(config, engine, MANY).num_slots
    nbytes = slots_nbytes(spec_of(engine.model.kv_groups, BLOCK), num_slots, MANY)
    usable = share * 40 * MIB - (2 * MIB if staging == "direct" else 0)
    assert 0.96 * usable < nbytes <= usable


@pytest.mark.parametrize("model", ["full", "windowed"])
def test_the_step_that_is_measured_on_a_gpu_is_one_that_the_model_computes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    for name, value in (("synchronize", None), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    loaded = load_model(folders[model], backend="torch")
    assert _measured(loaded, num_tokens=64, num_decoding=4, context=LENGTH, block_tokens=BLOCK) == 250


def test_a_step_that_does_not_fit_is_an_error_that_says_what_to_do(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kv_capacity, "step_nbytes", fail)
    with pytest.raises(StartupError, match="no memory for a step of 64 tokens at the end of 1024: lower --max-model-"):
        chosen(config_of(folders["full"]))


def test_the_chosen_capacity_is_logged_and_registered(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_capacity, "host_free_nbytes", lambda: 1000 * MIB)

    async def described() -> int:
        node = WorkerNode(
            config_of(folders["full"], messenger=assemble(MessengerConfig, shm_dir=tmp_path)), ROLE_AGGREGATED
        )
        try:
            assert node.max_model_len == LENGTH
            assert node.free_tokens == node.slots.pool.num_available * BLOCK
            return int(node._engine_description().capacity_tokens)
        finally:
            await node.close()

    with caplog.at_level(logging.INFO, logger="worker.kv_capacity"):
        assert asyncio.run(described()) == LIMITS.max_batch * LENGTH
    assert "capacity_tokens auto: 4096 (" in caplog.text
    assert "of 1,000 MiB free in host memory" in caplog.text


def test_a_step_needs_no_more_than_is_left_for_it(tmp_path: Path) -> None:
    folder = write_random_model(
        tmp_path / "m", RandomModelSpec(layers=2, hidden=256, heads=8, kv_heads=4, vocab=20000, max_len=4096)
    )
    for backend in ("compiled", "torch"):
        command = [sys.executable, "-c", _MEASURE, str(folder), backend]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        estimated, measured = map(int, ended.stdout.split())
        assert measured < estimated < 6 * measured, backend


_MEASURE = """
import re, sys
from pathlib import Path
import numpy as np
from engine import ForwardBatch, SequenceChunk, load_model
from engine.sampling import SamplingRow, sample
from engine.step_memory import step_nbytes

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

model = load_model(sys.argv[1], threads=1, backend=sys.argv[2])
model.warm_up()
cache = model.new_cache((256,), 16)
cache.memory.fill_(0)
tables = (np.arange(256, dtype=np.int32),)
chunks = [SequenceChunk(np.zeros(1, np.int32), 0, (np.zeros(1, np.int32),), want_logits=True) for _ in range(64)]
chunks.append(SequenceChunk(np.zeros(512, np.int32), 4096 - 512, tables, want_logits=True))
before = status("RssAnon")
Path("/proc/self/clear_refs").write_text("5")
extra = status("VmHWM") - before
row = SamplingRow(temperature=1.0, top_p=0.5, top_k=1, seed=0, choice=0, index=0, min_p=0.5)
sample(model.forward(ForwardBatch(chunks), cache), [row] * 65)
measured = status("VmHWM") - extra - before
print(step_nbytes(model, num_tokens=512, num_decoding=64, context=4096, block_tokens=16), measured)
"""
