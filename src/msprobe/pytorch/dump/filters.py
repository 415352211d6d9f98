"""Collect this? ``list``, ``scope``, ``tensor_list`` and ``risk_level``, on record names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_REGEX = re.compile(r"name-regex\((.*)\)\Z", re.DOTALL)


def matcher(entry: str) -> Callable[[str], bool]:
    """Predicate of one entry: a case-sensitive substring, or ``name-regex(...)`` to be found."""
    regex = _REGEX.match(entry)
    if regex is not None:
        found = re.compile(regex.group(1)).search
        return lambda name: found(name) is not None
    return lambda name: entry in name


class Names:
    """A list of entries; remembers which of them have matched anything."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._tests = [(entry, matcher(entry)) for entry in entries]
        self._met: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._tests)

    def match(self, name: str) -> bool:
        """Whether any entry matches ``name``, a record that is there; notes which ones do."""
        met = [entry for entry, test in self._tests if test(name)]
        self._met.update(met)
        return bool(met)

    def would_match(self, name: str) -> bool:
        """Whether any entry matches ``name``, a record that may come or not."""
        return any(test(name) for _, test in self._tests)

    def unmet(self) -> list[str]:
        """Entries that have matched no name so far."""
        return [entry for entry, _ in self._tests if entry not in self._met]


class Selection:
    """Decides for each record of one step. A decision never changes a record's number."""

    def __init__(
        self,
        names: Sequence[str],
        scope: Sequence[str],
        risk_level: str,
        *,
        expand: bool,
        white_list: Sequence[str] = (),
        black_list: Sequence[str] = (),
    ) -> None:
        self.names = Names(names)
        self._white, self._black = frozenset(white_list), frozenset(black_list)
        self._first, self._last = scope if scope else ("", "")
        self._on = not scope
        self._begun = False
        self._ended = False
        self._expand = expand
        # `list` and `scope` name records themselves: the risk class is not asked then.
        self._risk = "ALL" if names or scope else risk_level
        listed = bool(names or scope or white_list or black_list)
        self.takes_all = not listed and self._risk == "ALL"

    def takes_api(self, name: str) -> bool:
        """Whether the lists of task acc_check let the API ``name`` (``relu``) pass."""
        return (not self._white or name in self._white) and name not in self._black

    def enter(self, name: str, risk: str, within: bool, *, taken: bool = True) -> bool:
        """Whether the record that begins now is wanted.

        ``risk`` is the class of an API (CORE, FOCUS, LOW; CORE for modules), ``within`` says
        whether it lies in a module that ``list`` selects (asked at level mix only).
        """
        if self._first:
            if name == self._first:
                self._on = self._begun = True
            if not self._on:
                return False
        if self.names:
            match = self.names.match if taken else self.names.would_match
            return match(name) or (self._expand and within)
        return self._risk == "ALL" or risk == "CORE" or (self._risk == "FOCUS" and risk == "FOCUS")

    def leave(self, name: str) -> None:
        """The record has ended; the last record of the scope ends the scope."""
        if self._last and name == self._last:
            self._ended = self._ended or self._on
            self._on = False

    def unmet(self) -> list[str]:
        """What was asked for and never met, in words."""
        lines = [f"list entry {entry!r} matched no record" for entry in self.names.unmet()]
        if self._first and not self._begun:
            lines.append(f"scope never began: there was no record {self._first!r}")
        elif self._last and not self._ended:
            lines.append(f"scope never ended: there was no record {self._last!r}")
        return lines
