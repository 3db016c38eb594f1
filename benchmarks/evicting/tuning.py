"""Workloads for tuning the eviction policy: single kinds of use, and their mixtures, phases and drifts."""

import random
from collections.abc import Iterator

from benchmarks.evicting.drawing import BlockIds, ChatKind, DrawnPrompt, EvictionWorkload, arrivals, chat, waves, zipf

_SHORT = ChatKind(turns=6, pause_s=30, opening=(2, 16), growth=(1, 4))
_AGENT = ChatKind(turns=30, pause_s=2, opening=(2, 16), growth=(1, 4))
_SLOW = ChatKind(turns=5, pause_s=600, sigma=1.2, opening=(2, 10), partial=True)


def documents(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield new questions about 400 documents, chosen by Zipf's law."""
    texts = [ids.take(rng.randint(4, 40)) for _ in range(400)]
    popularity = zipf(400, 1.0)
    for number in range(6000):
        yield DrawnPrompt(number * 0.5, rng.choices(texts, cum_weights=popularity)[0] + ids.take(1))


def chats(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats of six turns on average, half a minute apart."""
    for start in range(1200):
        yield from chat(rng, ids, 1.5 * start, (), _SHORT)


def agents(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield agents that call a tool every two seconds, thirty times on average."""
    for start in range(150):
        yield from chat(rng, ids, 5.0 * start, (), _AGENT)


def chats_and_batch(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats and long prompts that are never repeated."""
    for start in range(800):
        yield from chat(rng, ids, 2.0 * start, (), _SHORT)
    for number in range(1600):
        yield DrawnPrompt(float(number), ids.take(rng.randint(20, 60)))


def recent(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield prompts that are repeated soon or never, the best case for LRU."""
    last: list[list[int]] = []
    for number in range(6000):
        if last and rng.random() < 0.7:
            prompt = last[-1 - min(int(rng.expovariate(1 / 25)), len(last) - 1)]
        else:
            prompt = ids.take(rng.randint(4, 24))
        last.append(prompt)
        yield DrawnPrompt(number * 0.5, prompt)


def loop(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield the same 200 prompts in the same order repeatedly, the worst case for LRU."""
    texts = [ids.take(rng.randint(10, 20)) for _ in range(200)]
    for number in range(4000):
        yield DrawnPrompt(number * 0.5, texts[number % len(texts)])


def tool_agents(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield agents of six applications, each with a long prompt that describes its tools."""
    tools = [ids.take(rng.randint(6, 24)) for _ in range(6)]
    popularity = zipf(6, 1.0)
    kind = ChatKind(turns=16, pause_s=4, opening=(1, 6), growth=(1, 2), partial=True)
    for start in arrivals(rng, 0.12, 3600):
        yield from chat(rng, ids, start, rng.choices(tools, cum_weights=popularity)[0], kind)


def slow_chats(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats whose users return after ten minutes or hours, with one of 30 system prompts."""
    systems = [ids.take(rng.randint(1, 6)) for _ in range(30)]
    popularity = zipf(30, 1.0)
    for start in arrivals(rng, 0.35, 7200):
        yield from chat(rng, ids, start, rng.choices(systems, cum_weights=popularity)[0], _SLOW)


def rag_and_batch(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield questions after retrieved documents, beside batch jobs over texts that are seen once."""
    instruction, texts = ids.take(3), [ids.take(rng.randint(3, 12)) for _ in range(900)]
    popularity = zipf(900, 1.0)
    for when in arrivals(rng, 1.5, 5400):
        yield DrawnPrompt(when, instruction + rng.choices(texts, cum_weights=popularity)[0] + ids.take(1))
    job = ids.take(4)
    for when in arrivals(rng, 0.5, 5400):
        yield DrawnPrompt(when, job + ids.take(rng.randint(8, 30)))


def everything(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield agents, chats, slow chats, questions about documents and batch jobs in the same hour."""
    tools, systems = [ids.take(rng.randint(8, 24)) for _ in range(5)], [ids.take(rng.randint(1, 6)) for _ in range(20)]
    texts, popularity = [ids.take(rng.randint(4, 30)) for _ in range(400)], zipf(400, 0.9)
    agent = ChatKind(turns=14, pause_s=5, opening=(1, 6), growth=(1, 2))
    for start in arrivals(rng, 0.05, 5400):
        yield from chat(rng, ids, start, rng.choice(tools), agent)
    for start in arrivals(rng, 0.1, 5400):
        yield from chat(rng, ids, start, rng.choice(systems), ChatKind(turns=6, pause_s=45))
    for start in arrivals(rng, 0.08, 5400):
        yield from chat(rng, ids, start, rng.choice(systems), _SLOW)
    for when in arrivals(rng, 0.5, 5400):
        yield DrawnPrompt(when, rng.choices(texts, cum_weights=popularity)[0] + ids.take(1))
    for when in arrivals(rng, 0.15, 5400):
        yield DrawnPrompt(when, ids.take(rng.randint(10, 60)))


def phases(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats, then a loop over texts, then questions about documents, then chats again."""
    for start in arrivals(rng, 0.7, 900):
        yield from chat(rng, ids, start, (), _SHORT)
    texts = [ids.take(rng.randint(10, 20)) for _ in range(250)]
    for number in range(1500):
        yield DrawnPrompt(1200 + 0.6 * number, texts[number % 250])
    popularity = zipf(250, 1.1)
    for when in arrivals(rng, 2, 3000, 2100):
        yield DrawnPrompt(when, rng.choices(texts, cum_weights=popularity)[0] + ids.take(2))
    for start in arrivals(rng, 0.7, 3900, 3000):
        yield from chat(rng, ids, start, (), _SHORT)


def drifting(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield questions about documents whose ranks move by one every few seconds."""
    texts, popularity = [ids.take(rng.randint(4, 24)) for _ in range(800)], zipf(800, 0.9)
    for when in arrivals(rng, 1.6, 5400):
        rank = rng.choices(range(800), cum_weights=popularity)[0]
        yield DrawnPrompt(when, texts[(rank + int(when / 8)) % 800] + ids.take(1))


def day_and_night(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats by day and batch jobs by night, in days of forty minutes."""
    systems = [ids.take(rng.randint(2, 10)) for _ in range(10)]
    for start in waves(rng, 0.5, 7200, 2400):
        yield from chat(rng, ids, start, rng.choice(systems), ChatKind(turns=6, pause_s=40))
    for when in waves(rng, 0.8, 7200, 2400, 0.5):
        yield DrawnPrompt(when, ids.take(rng.randint(6, 40)))


def loop_and_chats(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield a job that reads the same texts again and again, beside chats."""
    texts = [ids.take(rng.randint(8, 24)) for _ in range(500)]
    for number in range(4500):
        yield DrawnPrompt(0.8 * number, texts[number % 500])
    for start in arrivals(rng, 0.25, 3600):
        yield from chat(rng, ids, start, (), ChatKind(turns=8, pause_s=35, partial=True))


TUNING = {
    generate.__name__: EvictionWorkload(generate)
    for generate in (
        documents,
        chats,
        agents,
        chats_and_batch,
        recent,
        loop,
        tool_agents,
        slow_chats,
        rag_and_batch,
        everything,
        phases,
        drifting,
        day_and_night,
        loop_and_chats,
    )
}
"""Workloads by name."""
