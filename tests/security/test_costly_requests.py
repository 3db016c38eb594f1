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


def nightly(attack: Attack) -> Any:
    """For attacks of which a cheaper one of the same kind runs always."""
    return pytest.param(attack, marks=pytest.mark.nightly)


def _name(attack: Attack) -> str:
    return attack.name


@pytest.mark.parametrize("attack", [nightly(bombs.SCHEMAS), bombs.SCATTERED_SCHEMAS], ids=_name)
async def test_schema_bombs_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


@pytest.mark.parametrize(
    "attack", [bombs.GRAMMARS, bombs.SCATTERED_GRAMMARS, bombs.AUTOMATA, nightly(bombs.LATE)], ids=_name
)
async def test_grammar_bombs_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


@pytest.mark.parametrize("attack", LARGE, ids=_name)
async def test_long_texts_are_refused_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)
