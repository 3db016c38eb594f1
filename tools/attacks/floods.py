"""Floods of expensive text: bodies at the size limit for every way to have text tokenised, and requests that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from tools.attacks.target import LIMITED, Attack, AttackedCluster, encoded, post, together, unlimited_session

MIB = 1 << 20
REFUSED = frozenset({"400", "413", "429", "503"})
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _text(nbytes: int) -> str:
    sentence = "The quick brown fox jumps over the lazy dog. "
    return (sentence * (nbytes // len(sentence) + 1))[:nbytes]


@cache
def long_text(nbytes: int = 15 * MIB) -> bytes:
    return encoded({"prompt": _text(nbytes)})


@cache
def long_chat() -> bytes:
    return encoded({"messages": [{"role": "user", "content": _text(15 * MIB)}]})


@cache
def long_ids() -> bytes:
    return b'{"prompt":[' + b"1," * (7 * MIB) + b'1],"max_tokens":1}'


@cache
def ids_to_text() -> bytes:
    return b'{"tokens":[' + b"1," * (7 * MIB) + b"1]}"


@cache
def long_conversation() -> bytes:
    """Return a chat of 5.6 MiB that is to be truncated, message by message."""
    turn = [{"role": "user", "content": "a b c d " * 60_000}, {"role": "assistant", "content": "x"}]
    last = {"role": "user", "content": "a b c d " * 200_000}
    return encoded({"messages": [*turn * 8, last], "truncation": "auto", "max_tokens": 1})


@cache
def truncated_text() -> bytes:
    return encoded({"prompt": "a b c d " * 1_800_000, "truncate_prompt_tokens": 5, "max_tokens": 1})


@cache
def many_tools(count: int = 20, properties: int = 1500) -> bytes:
    """Return a chat with `count` tools of 100 KiB each."""

    def tool(at: int) -> dict[str, Any]:
        fields = {
            f"p{at}_{field}": {"type": "string", "pattern": "^[a-z]{1,50}(foo|bar)*$"} for field in range(properties)
        }
        parameters = {"type": "object", "properties": fields}
        return {"type": "function", "function": {"name": f"f{at}", "parameters": parameters}}

    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return encoded(chat | {"tools": [tool(at) for at in range(count)]})


def _flood(
    name: str, description: str, path: str, body: Callable[[], bytes], count: int, allowed: frozenset[str] = REFUSED
) -> Attack:
    async def run(target: AttackedCluster) -> Counter[str]:
        async with unlimited_session() as session:
            return await together([post(session, target, path, body(), within_s=100.0) for _ in range(count)])

    return Attack(name, description, run, allowed, within_s=110.0)


TOKENIZE = _flood("tokenise", "4 texts of 15 MiB to /tokenize at once", "/tokenize", long_text, 4)
TOKENIZE_CHAT = _flood("tokenise chats", "4 chats of 15 MiB to /tokenize at once", "/tokenize", long_chat, 4)
DETOKENIZE = _flood("detokenise", "4 times 7,340,033 token ids to /detokenize at once", "/detokenize", ids_to_text, 4)
IDS = _flood("long prompts", "6 prompts of 7,340,033 token ids at once", COMPLETIONS, long_ids, 6)
TRUNCATION = _flood(
    "truncated chats",
    "2 chats of 5.6 MiB with truncation: auto at once",
    CHAT,
    long_conversation,
    2,
    REFUSED | {"200"},
)
TRUNCATED_PROMPT = _flood(
    "truncated prompts",
    "2 prompts of 14 MiB with truncate_prompt_tokens at once",
    COMPLETIONS,
    truncated_text,
    2,
    REFUSED | {"200"},
)
TOOLS = _flood("tools", "2 chats with 20 tools of 100 KiB each at once", CHAT, many_tools, 2, REFUSED | {"200"})


async def failing(target: AttackedCluster, who: str, count: int) -> Counter[str]:
    """Send `count` invalid requests, one after the other."""
    found: Counter[str] = Counter()
    async with unlimited_session() as session:
        for _ in range(count):
            body = {"prompt": "a", "max_tokens": 1, "guided_regex": "("}
            found[(await post(session, target, COMPLETIONS, body, who)).outcome] += 1
    return found


FAILED = Attack(
    "failing requests",
    "60 invalid requests of a tenant with a quota of 5 a minute",
    lambda target: failing(target, LIMITED, 60),
    frozenset({"400", "429"}),
)


async def _quota(target: AttackedCluster) -> Counter[str]:
    async with unlimited_session() as session:
        found = [
            (await post(session, target, "/tokenize", {"prompt": "hello"}, LIMITED, within_s=20.0)).outcome
            for _ in range(30)
        ]
    return Counter(found)


TOKENIZE_QUOTA = Attack(
    "tokenising over the quota",
    "30 short texts to /tokenize of a tenant with a quota of 5 requests a minute",
    _quota,
    frozenset({"200", "429"}),
)


ATTACKS = (TOKENIZE, TOKENIZE_CHAT, DETOKENIZE, IDS, TRUNCATION, TRUNCATED_PROMPT, TOOLS, FAILED, TOKENIZE_QUOTA)
