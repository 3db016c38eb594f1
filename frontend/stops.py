"""Stop strings over a stream of text pieces: nothing that may still become one is let out. Pure.

The result does not depend on how the text is cut into pieces: the match that ends first wins, and among those that end
together the longest.
"""

from collections.abc import Sequence


class StopStrings:
    """Knuth-Morris-Pratt over several patterns, one state each; linear in the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that can go out, the stop string found or None). After a match nothing may be fed any more."""
        if not self._patterns:
            return text, None
        window = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            matched = [pattern for pattern in self._patterns if pattern.advance(char)]
            if matched:
                stop = max(matched, key=lambda pattern: len(pattern.text)).text
                self._held = ""
                return window[: position - len(stop)], stop
        keep = len(window) - max(pattern.matched for pattern in self._patterns)
        self._held = window[keep:]
        return window[:keep], None

    def flush(self) -> str:
        """What was held back; called once, when the text ends without a match."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One pattern's automaton: `matched` characters of it are a suffix of the text so far."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("an empty stop string matches everywhere")
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def advance(self, char: str) -> bool:
        """Whether the pattern ends with this character."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)
