"""Patches: the only place that sets attributes outside of this package, and takes them back.

Traps handled here:

* 471 methods of ``torch.Tensor`` are inherited from ``torch._C.TensorBase``. What is set on
  ``torch.Tensor`` is a shadow, so only a ``delattr`` brings ``vars(torch.Tensor)`` back.
* From CPython 3.13 on a class has 1000 method-cache versions, and a look-up after a change takes
  one. So all is read first and then written in one block, and taken out in one block: a window
  takes two. After the last a look-up in a tensor takes 80 ns, not 60; a step is not slower.
* Somebody may have patched on top of us. Then the attribute is theirs: it is left alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_ABSENT = object()

# (object for setattr, or None: write into the mapping; mapping to read; name; original; ours).
# The original is _ABSENT where the attribute was inherited, or the key missing.
_Patch = tuple[Any, Any, Any, Any, Any]


class Patches:
    """Replaced attributes and their originals, from `replace` until `restore`.

    >>> import math
    >>> patches = Patches()
    >>> patches.replace(math, "sqrt", abs).__name__
    'sqrt'
    >>> math.sqrt(-4)
    4
    >>> patches.restore()
    >>> math.sqrt(4)
    2.0
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._installed: list[_Patch] = []
        self._lifted: list[_Patch] = []
        self._covered: list[_Patch] = []
        self._lifts = 0

    def replace(self, owner: Any, attr: str, new: Any) -> Any:
        """Set ``owner.attr = new`` until `restore`; return the original.

        The original is what stands in ``vars(owner)`` (a ``staticmethod`` stays one), else what is
        inherited. AttributeError if there is nothing to replace.
        """
        own = vars(owner)
        original = own[attr] if attr in own else getattr(owner, attr)
        self._install(plan([(owner, attr, new)]))
        return original

    def replace_in(self, mapping: MutableMapping[Any, Any], key: Any, new: Any) -> Any:
        """Set ``mapping[key] = new`` until `restore`; return the original, None if there was none.

        For the ``__dict__`` of a module or object; the order of the keys stays.
        """
        original = mapping.get(key, _ABSENT)
        self._install([(None, mapping, key, original, new)])
        return None if original is _ABSENT else original

    def install(self, items: Iterable[tuple[Any, str, Any]]) -> None:
        """Do `replace` for many ``(owner, attr, new)``, each attribute once: all of them or none.

        Items of one owner are best kept together. 1,100 take 0.3 ms.
        """
        self._install(plan(items))

    def install_plan(self, planned: list[_Patch]) -> None:
        """`install` of what `plan` has made, while `is_current`."""
        self._install(planned)

    def undo(self, owner: Any, attr: str) -> bool:
        """Take back the latest patch of ``owner.attr``; say whether there was one to take back."""
        with self._lock:
            index = _latest(self._lifted, owner, attr)
            if index is not None:
                del self._lifted[index]
                return True
            index = _latest(self._installed, owner, attr)
            if index is None:
                return False
            left: list[_Patch] = []
            _take_out([self._installed.pop(index)], [], left)
            self._covered += left
        _warn_covered(left)
        return not left

    def restore(self) -> None:
        """Bring every original back, last patch first. A second call does nothing.

        An attribute that somebody else has changed since stays theirs, with one warning. If they
        put ours back later, the next `restore` takes it out.
        """
        with self._lock:
            covered: list[_Patch] = []
            _take_out(self._installed, [], covered)
            still: list[_Patch] = []
            _take_out(self._covered[::-1], [], still)
            self._covered = covered + still
            self._lifted = []
        _warn_covered(covered)

    def is_installed(self) -> bool:
        """Whether any patch is in place or lifted."""
        return bool(self._installed or self._lifted)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Bring the originals back for a block, for all threads. Blocks may nest and overlap."""
        self.lift()
        try:
            yield
        finally:
            self.put_back()

    def lift(self) -> None:
        """Bring the originals back until the matching `put_back`; only the first lift acts."""
        with self._lock:
            self._lifts += 1
            if self._lifts > 1:
                return
            left: list[_Patch] = []
            _take_out(self._installed, self._lifted, left)
            self._installed = left[::-1]
            self._lifted.reverse()

    def put_back(self, renew: Callable[[Any, Any], Any] | None = None) -> None:
        """End one `lift`; after the last the patches return.

        Where somebody has patched meanwhile, ``renew(ours, theirs)`` says what replaces theirs,
        or None. Without ``renew`` theirs stays, with a warning.
        """
        with self._lock:
            self._lifts = max(0, self._lifts - 1)
            if self._lifts:
                return
            lifted, self._lifted = self._lifted, []
            covered = []
            for patch in lifted:
                place, read, attr, original, new = patch
                current = read.get(attr, _ABSENT)
                if current is not original:
                    new = renew(new, current) if renew and current is not _ABSENT else None
                if new is None:
                    covered.append(patch)
                    continue
                self._installed.append((place, read, attr, current, new))
                _put_in(self._installed[-1])
            self._covered += covered
        if renew is None:
            _warn_covered(covered)

    def _install(self, planned: list[_Patch]) -> None:
        with self._lock:
            if self._lifts:
                self._lifted += planned
                return
            # Noted first: whatever interrupts this, `restore` knows what may be in place.
            self._installed += planned
            try:
                _put_in(*planned)
            except Exception:
                _take_out(list(planned), [], [])
                del self._installed[-len(planned) :]
                raise


def plan(items: Iterable[tuple[Any, str, Any]]) -> list[_Patch]:
    """What `Patches.install` of these items will do; kept, it need not be made again."""
    planned: list[_Patch] = []
    last: Any = _ABSENT
    place: Any = None
    read: Mapping[str, Any] = {}
    for owner, attr, new in items:
        if owner is not last:
            last, read = owner, vars(owner)
            place = None if type(owner) is ModuleType else owner
        original = read.get(attr, _ABSENT)
        if original is _ABSENT:
            getattr(owner, attr)  # raises AttributeError where there is nothing to replace
        planned.append((place, read, attr, original, new))
    return planned


def is_current(planned: list[_Patch]) -> bool:
    """Whether everything that a plan is to replace is still there."""
    return all(read.get(attr, _ABSENT) is original for _, read, attr, original, _ in planned)


def _latest(patches: list[_Patch], owner: Any, attr: str) -> int | None:
    mapping = vars(owner)
    for index in range(len(patches) - 1, -1, -1):
        place, read, name, _, _ = patches[index]
        if name == attr and (place is owner or (place is None and read is mapping)):
            return index
    return None


def _put_in(*patches: _Patch) -> None:
    for place, read, attr, _, new in patches:
        if place is None:
            read[attr] = new
        else:
            setattr(place, attr, new)


def _take_out(patches: list[_Patch], undone: list[_Patch], left: list[_Patch]) -> None:
    """Undo all, last first. Each moves to ``undone``; to ``left`` if somebody else has set it."""
    for patch in reversed(patches):
        place, read, attr, original, new = patch
        current = read.get(attr, _ABSENT)
        if current is new:
            if original is _ABSENT:
                if place is None:
                    del read[attr]
                else:
                    delattr(place, attr)
            elif place is None:
                read[attr] = original
            else:
                setattr(place, attr, original)
        (left if current is not new and current is not original else undone).append(patch)
        patches.pop()  # at once: Ctrl-C may come anywhere, and somebody calls again


def _warn_covered(patches: list[_Patch]) -> None:
    if patches:
        names = ", ".join(_readable(patch) for patch in patches[:10])
        logger.warning(
            "%d attribute(s) were changed by other code while msprobe had them replaced, and are"
            " left as they are now: %s%s",
            len(patches), names, " ..." if len(patches) > 10 else "",
        )


def _readable(patch: _Patch) -> str:
    place, read, attr, _, _ = patch
    name = getattr(place, "__name__", type(place).__name__) if place is not None else ""
    return f"{name or read.get('__name__', 'a dictionary')}.{attr}"
