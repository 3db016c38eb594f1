"""All generations of one HTTP request, as one sequence of steps."""

import asyncio
from collections.abc import Sequence

from frontend.driver import Generation
from frontend.errors import ApiError
from frontend.output import Step
from frontend.quotas import UNCOUNTED, Stay


class Session:
    """Merges generations. `close` must be called in any case; it ends what still runs."""

    def __init__(self, generations: Sequence[Generation], stay: Stay = UNCOUNTED) -> None:
        self.generations = generations
        self._stay = stay
        self._running = set(range(len(generations)))
        self._pending: dict[asyncio.Task[Step], int] = {}

    def read_prompts(self) -> None:
        """Make the text of prompts that are told with their answers; before the first `next`, on any one thread."""
        for generation in self.generations:
            generation.read_prompt()

    @property
    def is_over(self) -> bool:
        """Whether every generation has ended: there is no next step."""
        return not self._running

    async def next(self) -> tuple[int, Step]:
        """The next (choice, step), whichever choice has one first; only while it is not over. Raises ApiError.

        A generation is asked for more only once its last step was taken, so a slow client slows the asking. Further
        answers to a prompt begin when the first one has a token, so that they reuse the prompt's KV.
        """
        if len(self.generations) == 1:  # no task per token for what is nearly every request
            return self._took(0, await self.generations[0].next())
        for index in sorted(self._running.difference(self._pending.values())):
            if not self.generations[index].may_begin:
                continue
            self._pending[asyncio.create_task(self.generations[index].next())] = index
        done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        task = min(done, key=self._pending.__getitem__)
        return self._took(self._pending.pop(task), task.result())

    async def collect(self) -> list[Step]:
        """All choices, each in one step. Raises the first ApiError of any."""
        steps: list[list[Step]] = [[] for _ in self.generations]
        while not self.is_over:
            index, step = await self.next()
            steps[index].append(step)
        return [Step.joined(of_choice) for of_choice in steps]

    def end(self, error: ApiError) -> None:
        """Make what waits for the next step fail with `error`."""
        for generation in self.generations:
            generation.end(error)

    async def close(self) -> None:
        """End every generation."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
        self._running.clear()
        for generation in self.generations:
            generation.close()
        served = not all(generation.was_refused for generation in self.generations)
        self._stay.leave(used_tokens=sum([each.used_tokens for each in self.generations]), served=served)

    def _took(self, index: int, step: Step) -> tuple[int, Step]:
        if step.finish_reason is not None:
            self._running.discard(index)
        return index, step
