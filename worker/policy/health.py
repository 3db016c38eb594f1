"""When an engine is past hope: its steps fail, one after the other, whatever they compute."""

from typing import Final

# More than the five attempts that one request is given: a request whose steps always fail must not, on its own, end
# the node that others are served by. Fewer would; many more would let each of them fail requests for nothing.
MAX_FAILED_STEPS: Final = 8


class EngineHealth:
    """Counts the steps that failed since the last one that did not."""

    def __init__(self, max_failed_steps: int = MAX_FAILED_STEPS) -> None:
        self._max_failed_steps = max_failed_steps
        self.num_failed = 0

    def failed(self) -> None:
        """A step failed."""
        self.num_failed += 1

    def succeeded(self) -> None:
        """A step computed something."""
        self.num_failed = 0

    @property
    def is_broken(self) -> bool:
        """No step can be expected to succeed: only another process may do better."""
        return self.num_failed >= self._max_failed_steps
