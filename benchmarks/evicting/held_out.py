"""Held-out workloads: fixed before the policy was tuned, and not to be changed for its sake.

They differ from those of `tuning` in kind: prompts that branch, flash crowds, windows that slide, periodic jobs,
tenants that come and go, scans of two phases, pauses with heavy tails.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator

from benchmarks.evicting.drawing import BlockIds, ChatKind, DrawnPrompt, EvictionWorkload, arrivals, chat, waves, zipf
from simulator.dialogues import DialogueSettings, make_dialogues


def samplings(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield prompts sampled 4 to 16 times within seconds; one sample of each is extended and sampled again, thrice."""
    for start in arrivals(rng, 0.25, 1500):
        prompt, when = ids.take(rng.randint(3, 30)), start
        for _ in range(3):
            for _ in range(rng.randint(4, 16)):
                yield DrawnPrompt(when + rng.expovariate(1 / 3), prompt + ids.take(1))
            prompt = prompt + ids.take(rng.randint(1, 4))
            when += rng.uniform(10, 90)


def evaluations(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield sweeps: all questions of a task after the same examples, one task after another; some run again."""
    tasks = [
        (ids.take(rng.randint(6, 30)), [ids.take(rng.randint(1, 3)) for _ in range(rng.randint(80, 300))])
        for _ in range(24)
    ]
    when, order = 0.0, list(range(24))
    for _ in range(2):
        for number in order:
            examples, questions = tasks[number]
            for question in questions:
                yield DrawnPrompt(when, examples + question)
                when += rng.expovariate(4)
            if rng.random() < 0.3:
                for question in questions:
                    yield DrawnPrompt(when, examples + question)
                    when += rng.expovariate(8)
        rng.shuffle(order)


def flash_crowds(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield questions about articles: a steady popularity by Zipf's law, and crowds that decay within minutes."""
    articles = [ids.take(rng.randint(3, 25)) for _ in range(1500)]
    popularity = zipf(1500, 0.7)
    for when in arrivals(rng, 1.5, 5400):
        yield DrawnPrompt(when, rng.choices(articles, cum_weights=popularity)[0] + ids.take(1))
    for start in arrivals(rng, 0.01, 5400):
        article = ids.take(rng.randint(5, 40))
        for _ in range(rng.randint(20, 250)):
            yield DrawnPrompt(start + rng.expovariate(1 / 240), article + ids.take(1))


def personas(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield the dialogues of `moonpool simulate dialogues` with short histories and long breaks."""
    settings = DialogueSettings(
        dialogues=700,
        mean_history_messages=40,
        seed=rng.randrange(2**31),
        start_hours=3,
        personas=40,
        persona_tokens=900,
        question_tokens=90,
        answer_tokens=250,
        think_s=75,
        break_share=0.08,
        break_s=2400,
    )
    beginnings: dict[int, list[int]] = {}
    for dialogue in make_dialogues(settings):
        blocks = list(beginnings.setdefault(dialogue.persona, ids.take(max(1, dialogue.persona_tokens // 512))))
        when, tokens = dialogue.start_s, dialogue.persona_tokens
        for turn in dialogue.turns:
            when += turn.pause_s
            tokens += turn.question_tokens
            blocks += ids.take(max(0, tokens // 512 - len(blocks)))
            yield DrawnPrompt(when, blocks + ids.take(1), partial=True)
            tokens += turn.answer_tokens


def editors(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield programmers at work: a repository's files, cut where the cursor is, and bursts between long breaks."""
    repositories = [ids.take(rng.randint(20, 60)) for _ in range(60)]
    for _ in range(150):
        repository, when = list(rng.choice(repositories)), rng.uniform(0, 5400)
        for _ in range(rng.randint(2, 6)):
            cursor = rng.randint(len(repository) // 3, len(repository))
            for _ in range(1 + int(rng.expovariate(1 / 8))):
                cursor = min(len(repository), max(1, cursor + rng.randint(-1, 2)))
                yield DrawnPrompt(when, repository[:cursor] + ids.take(rng.randint(1, 2)), partial=True)
                if rng.random() < 0.15:
                    repository = repository[:cursor] + ids.take(len(repository) - cursor)
                when += rng.lognormvariate(0, 0.7) * 20
            when += rng.lognormvariate(0, 0.6) * 1500


def sliding_windows(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats that send the last 24 blocks only: once a chat is longer, only the system prompt is found again."""
    systems = [ids.take(rng.randint(2, 6)) for _ in range(8)]
    for start in arrivals(rng, 0.12, 5400):
        system, history, when = rng.choice(systems), deque(ids.take(rng.randint(1, 12)), maxlen=24), start
        for _ in range(1 + int(rng.expovariate(1 / 9))):
            blocks = list(history)
            # The same content after a different block is another block: new ids, since the window has moved.
            yield DrawnPrompt(when, system + (blocks if len(blocks) < 24 else ids.take(24)))
            history.extend(ids.take(rng.randint(1, 4)))
            when += rng.lognormvariate(0, 1.0) * 45


def periodic_jobs(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield monitoring agents, each with its own prompt and period of 2 to 40 minutes, beside visitors."""
    for _ in range(220):
        prompt, period = ids.take(rng.randint(4, 40)), 120 * 20 ** rng.random()
        when = rng.uniform(0, period)
        while when < 7200:
            data = ids.take(rng.randint(1, 3))
            for step in range(rng.randint(1, 3)):
                yield DrawnPrompt(when + 4 * step, prompt + data[: step + 1])
            when += period * rng.uniform(0.97, 1.03)
    for when in arrivals(rng, 0.5, 7200):
        yield DrawnPrompt(when, ids.take(rng.randint(2, 14)))


def tenants(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield 24 tenants with documents of their own, each active in spells of some minutes."""
    for _ in range(24):
        texts = [ids.take(rng.randint(3, 24)) for _ in range(rng.randint(20, 120))]
        popularity, when = zipf(len(texts), rng.uniform(0.3, 1.2)), rng.uniform(0, 1800)
        while when < 7200:
            end = when + rng.expovariate(1 / 400)
            for moment in arrivals(rng, 0.6, end, when):
                yield DrawnPrompt(moment, rng.choices(texts, cum_weights=popularity)[0] + ids.take(rng.randint(0, 2)))
            when = end + rng.expovariate(1 / 1500)


def two_passes(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield summaries of books: every chapter after the same instruction, then every chapter again; chats meanwhile."""
    instruction, when = ids.take(5), 0.0
    for _ in range(40):
        chapters = [ids.take(rng.randint(8, 16)) for _ in range(rng.randint(10, 160))]
        for _ in range(2):
            for chapter in chapters:
                yield DrawnPrompt(when, instruction + chapter)
                when += rng.expovariate(1.2)
    kind = ChatKind(turns=7, pause_s=25, sigma=0.9, opening=(1, 6), growth=(1, 2))
    for start in arrivals(rng, 0.1, when):
        yield from chat(rng, ids, start, (), kind)


def nights(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats by day, whose pauses have a heavy tail, and every night a scan of the same archive."""
    day_s, archive = 5400.0, [ids.take(rng.randint(10, 30)) for _ in range(350)]
    greeting = ids.take(3)
    for start in waves(rng, 0.25, 3 * day_s, day_s):
        prompt, when = greeting + ids.take(rng.randint(1, 8)), start
        for _ in range(1 + int(rng.expovariate(1 / 5))):
            yield DrawnPrompt(when, list(prompt))
            prompt += ids.take(rng.randint(1, 3))
            when += min(15 * rng.paretovariate(0.9), 20000)
    for night in range(1, 4):
        for number, text in enumerate(archive):
            yield DrawnPrompt(night * day_s - 600 + 3.0 * number, text)


def slower_and_slower(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield chats whose median pause grows from 5 seconds to 10 minutes, and whose turns become fewer."""
    systems = [ids.take(rng.randint(1, 10)) for _ in range(12)]
    popularity = zipf(12, 1.0)
    for start in arrivals(rng, 0.2, 5400):
        share = start / 5400
        kind = ChatKind(turns=14 - 10 * share, pause_s=5 * 120**share, sigma=0.7, opening=(1, 10), partial=True)
        yield from chat(rng, ids, start, rng.choices(systems, cum_weights=popularity)[0], kind)


def medley(rng: random.Random, ids: BlockIds) -> Iterator[DrawnPrompt]:
    """Yield a third each of the editors, flash crowds, periodic jobs and samplings in the same cluster."""
    parts: Iterable[Iterable[DrawnPrompt]] = (
        editors(rng, ids),
        flash_crowds(rng, ids),
        periodic_jobs(rng, ids),
        samplings(rng, ids),
    )
    for part in parts:
        # A request's branch stays or goes as a whole: thinning single turns would change their pauses.
        kept: dict[int, bool] = {}
        for request in part:
            first = request.blocks[0]
            if kept.setdefault(first, rng.random() < 1 / 3):
                yield request


HELD_OUT = {
    generate.__name__: EvictionWorkload(generate)
    for generate in (
        samplings,
        evaluations,
        flash_crowds,
        personas,
        editors,
        sliding_windows,
        periodic_jobs,
        tenants,
        two_passes,
        nights,
        slower_and_slower,
        medley,
    )
}
"""Workloads by name."""
