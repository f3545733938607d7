"""Finds stop strings in text that arrives in pieces.

A stop string may begin in one token and end in another. What could still become one is held back; everything else
leaves at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What one piece of text led to.

    Attributes:
        text: characters that may leave now.
        stop: the stop string that is complete, or None. After one was found the matcher is done.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """An immutable automaton over all stop strings of a request, shared by its choices.

    Source: Aho and Corasick, Efficient String Matching, CACM 18(6), 1975, sections 2 and 3.
    """

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        """`strings` are not empty; `include_in_output` leaves a found one in the text."""
        self.include_in_output = include_in_output
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        self._fail = [0]
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._goto) > 1

    def matcher(self) -> StopMatcher:
        """A matcher at the start of a text."""
        return StopMatcher(self)

    def can_start_in(self, text: str) -> bool:
        """Whether any character of `text` begins a stop string."""
        return not self._goto[0].keys().isdisjoint(text)

    def next_state(self, state: int, char: str) -> int:
        """The longest prefix of a stop string that ends with `char`."""
        goto = self._goto
        while char not in goto[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return goto[state][char]

    def growing_state(self, state: int) -> int:
        """The longest suffix of `state` that more text can still turn into a stop string."""
        while state and not self._goto[state]:
            state = self._fail[state]
        return state

    def depth(self, state: int) -> int:
        """How many of the last characters are the beginning of a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here, or None."""
        return self._found[state]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self._found[state] = string

    def _link(self) -> None:
        """Fail links, breadth first: the longest proper suffix of a state that is a state too."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._goto[state].items():
                self._fail[child] = self.next_state(self._fail[state], char)
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)


class StopMatcher:
    """The stop strings of one choice. The stop that ends first counts; of two that end together, the longer."""

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> StopMatch:
        """Take more text.

        Args:
            may_stop: False while too few tokens were made; a stop string that ends here is then plain text.
        """
        stops = self._stops
        state = self._state
        if state == 0 and not stops.can_start_in(text):
            return StopMatch(text=text)
        for position, char in enumerate(text):
            state = stops.next_state(state, char)
            stop = stops.found(state)
            if stop is not None:
                if may_stop:
                    return self._end(text[: position + 1], stop)
                state = stops.growing_state(state)
        self._state = state
        if stops.include_in_output:
            return StopMatch(text=text)
        whole = self._held + text
        leaving = len(whole) - stops.depth(state)
        self._held = whole[leaving:]
        return StopMatch(text=whole[:leaving])

    def flush(self) -> str:
        """At the end of the text: what was held back and is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, text: str, stop: str) -> StopMatch:
        whole = self._held + text
        self._held, self._state = "", 0
        return StopMatch(text=whole if self._stops.include_in_output else whole[: len(whole) - len(stop)], stop=stop)
