"""Work on long prompts keeps neither the event loop nor the interpreter to itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
TEXT = "the people of the water come before little places, where 42 owls wait. " * 6000
LONG_TOKENS = 100_000


def longest_hold(work: Callable[[], object]) -> tuple[float, float]:
    """(longest CPU time for which another thread did not get the interpreter while `work` ran, CPU time of it all)"""
    stop, holds = threading.Event(), [0.0]

    def beat() -> None:
        woken, spent = time.monotonic(), time.process_time()
        while not stop.is_set():
            time.sleep(0.001)
            now, cpu = time.monotonic(), time.process_time()
            holds.append(min(now - woken, cpu - spent))
            woken, spent = now, cpu

    thread = threading.Thread(target=beat)
    thread.start()
    before = time.process_time()
    try:
        work()
    finally:
        spent = time.process_time() - before
        stop.set()
        thread.join()
    return max(holds), spent


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED)


def test_a_long_text_is_tokenised_beside_other_threads(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) >= LONG_TOKENS
    hold_s, whole_s = longest_hold(lambda: tokenizer.encode(TEXT, add_special_tokens=False))
    assert hold_s < 0.5 * whole_s  # held throughout, it would be all of it


def test_a_long_text_has_the_ids_of_its_parts(tokenizer: Tokenizer) -> None:
    part = "the people of the water come before little places, where 42 owls wait. "
    several = tokenizer.encode(part * 3, add_special_tokens=False)
    whole = tokenizer.encode(part * 300, add_special_tokens=False)
    assert whole[: len(several) - 2] == several[:-2]
    assert tokenizer.decode(whole, skip_special_tokens=False) == part * 300
    assert tokenizer.decode(several, skip_special_tokens=False) == part * 3


def test_many_ids_are_decoded_beside_other_threads(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False) * 10
    hold_s, whole_s = longest_hold(lambda: tokenizer.decode(ids, skip_special_tokens=False))
    assert hold_s < 0.5 * whole_s
