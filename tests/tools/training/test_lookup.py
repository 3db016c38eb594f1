"""The starting weights can look things up before any training."""

import pytest
import torch
from torch.nn import functional

from tools.training import sinks
from tools.training import tokenizer as bpe
from tools.training.errors import UnsuitableShape
from tools.training.lookup import write_lookup
from tools.training.model import Llama, ModelShape


def repeated_loss(model: Llama) -> tuple[float, float]:
    """Loss of a random sequence the first time and the second and third time, in nats."""
    span = torch.randperm(2000, generator=torch.Generator().manual_seed(2))[:100] + 40
    ids = torch.cat((torch.zeros(1, dtype=torch.int64), span, span, span))[None]
    with torch.no_grad():
        losses = functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
    return float(losses[:100].mean()), float(losses[110:].mean())


def test_a_repeated_sequence_is_expected_from_the_first_step() -> None:
    model = Llama(ModelShape())
    model.initialise(20)
    first, again = repeated_loss(model)
    assert abs(first - again) < 0.1
    write_lookup(model, 20)
    first, again = repeated_loss(model)
    assert again < first - 0.5


def test_bos_takes_half_of_the_attention_of_the_layers_after_the_circuit() -> None:
    model = Llama(ModelShape(layers=5))
    model.initialise(20)
    ids = torch.randint(6, 2048, (1, 400), generator=torch.Generator().manual_seed(4))
    ids[0, 0] = bpe.BOS_ID
    before = sinks.mass_by_layer(model, ids, 200)
    write_lookup(model, 20)
    after = sinks.mass_by_layer(model, ids, 200)
    assert max(before) < 0.02
    assert min(after[3:]) > 0.4
    assert sinks.window_loss(model, ids, window=100, sinks=1) == pytest.approx(
        sinks.window_loss(model, ids, window=100, sinks=4), abs=0.2
    )


def test_a_shape_without_room_for_the_circuit_is_refused() -> None:
    with pytest.raises(UnsuitableShape, match="2 key/value heads"):
        write_lookup(Llama(ModelShape(kv_heads=1)), 20)
