"""Requests that are small or allowed and cost much: the second tenant is served, and memory stays within limits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.conftest import carry_out
from tools.attacks import bombs, floods
from tools.attacks.target import Attack, AttackedCluster

LARGE = (
    floods.TOKENIZE,
    floods.TOKENIZE_CHAT,
    floods.DETOKENIZE,
    floods.IDS,
    floods.TRUNCATION,
    floods.TRUNCATED_PROMPT,
    floods.TOOLS,
)


@pytest.mark.parametrize("attack", [bombs.SCHEMAS, bombs.SCATTERED_SCHEMAS], ids=lambda attack: attack.name)
async def test_schema_bombs_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


@pytest.mark.parametrize(
    "attack", [bombs.GRAMMARS, bombs.SCATTERED_GRAMMARS, bombs.AUTOMATA, bombs.LATE], ids=lambda attack: attack.name
)
async def test_grammar_bombs_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


@pytest.mark.parametrize("attack", LARGE, ids=lambda attack: attack.name)
async def test_long_texts_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)
