"""The next turn finds the prefix of its prompt computed, where the template renders the history otherwise."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import metric, running_cluster
from tests.e2e.test_conversations import MODEL, cached

THOUGHT_CHARS = 40  # of an answer, which the history drops
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    f"{{{{ message.content[{THOUGHT_CHARS}:] if message.role == 'assistant' else message.content }}}}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster whose template drops the beginning of each answer from the history, as others drop reasoning."""
    folder = tmp_path_factory.mktemp("forgetful") / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = ["--prefill-nodes", "1", "--decode-nodes", "1", "--block-tokens", "16"]
    with running_cluster(tmp_path_factory.mktemp("cluster"), folder, *flags) as cluster:
        yield cluster


async def two_turns(cluster: Any, session: aiohttp.ClientSession, salt: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the second turn of a chat whose first one has the hints."""

    async def ask(messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        body = {"messages": messages, "cache_salt": salt, "max_tokens": 200, "ignore_eos": True, "seed": 1, **options}
        async with session.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
        return answer

    messages = [{"role": "user", "content": "Tell me of copper lanterns beyond the northern gate."}]
    before = await metric(session, cluster.url, 'moonpool:next_turn_prefills_total{outcome="computed"}')
    first = await ask(messages, hints=hints)
    if hints:
        async with asyncio.timeout(WITHIN_S):
            while await metric(session, cluster.url, 'moonpool:next_turn_prefills_total{outcome="computed"}') == before:
                await asyncio.sleep(0.05)
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    return await ask([*messages, {"role": "user", "content": "And then?"}], max_tokens=16, return_token_ids=True)


async def test_the_next_turn_reuses_what_was_computed_in_advance(
    forgetful: Any, session: aiohttp.ClientSession
) -> None:
    without = await two_turns(forgetful, session, "without", {})
    hinted = await two_turns(forgetful, session, "with", {"prefill_next_turn": True})
    prompt = hinted["prompt_token_ids"]
    assert prompt == without["prompt_token_ids"]
    assert hinted["choices"][0]["token_ids"] == without["choices"][0]["token_ids"]
    assert cached(hinted) >= cached(without) + 64
    assert cached(hinted) >= len(prompt) - 48  # all but the new message
    await forgetful.validate()
