"""What one step has collected and not yet written, and the writing of it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from . import callstack, lines, small, stats
from .background import Background
from .tensor_files import TensorFiles
from .writer import Writer

_RAISED = "it raised an exception, or the window closed before it returned"
_ENOUGH = 256  # small tensors that are measured together


class Journal:
    """Queues between the threads that record and whoever flushes.

    Recording takes no lock: deques and dicts change atomically. A flush takes the queues over in
    an order that loses nothing: first what is running, then what is done, then the values.
    """

    def __init__(
        self, writer: Writer, wake: Callable[[], None], tensors: TensorFiles | None = None
    ) -> None:
        self.writer = writer
        self.records = 0
        self.running: dict[str, Any] = {}  # name → Call: begun, not returned
        self.drafts: dict[str, Any] = {}  # records that may still change: gradients of save()
        self.incomplete: dict[str, str] = {}  # record of a call without a result → why
        self._wake = wake
        self._idle = True  # nothing has come since the last flush began
        # Key of the caller's stack; None where stack.json is not written.
        has_stacks = writer.has_stacks
        self.capture_stack: Callable[[], Any] = callstack.capture if has_stacks else _no_stack
        self._done: deque[tuple[str, Any]] = deque()  # (name, record, or its line when final)
        self.parents: deque[tuple[str, str | None]] = deque()
        self._stacks: deque[tuple[str, Any]] = deque()
        self._deferred: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self.small: deque[small.Waiting] = deque()  # tensors to be measured together
        self._texts = 0  # how many records at the head of `_done` have become text
        self._measuring = threading.RLock()  # held while values are filled in
        self._lock = threading.RLock()  # held while files are written
        self._awaited: list[str] = []  # places of descriptions that are filled in later
        self._holding = threading.Lock()
        self._discarded = False
        self._tensors = tensors or TensorFiles(writer, Background())

    def add(self, name: str, record: Any) -> None:
        """A complete record.

        It becomes text at once unless it waits for values: thousands of dicts and lists that live
        until the next flush would keep the garbage collector busy.
        """
        self.records += 1
        waits = self.small or self._deferred
        self._done.append((name, record if waits else self._text(name, record)))
        if len(self.small) >= _ENOUGH:
            self._settle_now()
        if self._idle:
            self._stir()

    def hold(self, path: str) -> None:
        """Until `release`, the record with this place in it is a draft, whenever it is added.

        Meanwhile another function stands in for `add`, which itself need not ask.
        """
        with self._holding:
            self._awaited.append(path)
            self.__dict__["add"] = self._add_or_hold

    def _add_or_hold(self, name: str, record: Any) -> None:
        with self._holding:
            if any(_is_within(path, name) for path in self._awaited):
                self.draft(name, record)
                return
        Journal.add(self, name, record)

    def release(self, path: str) -> None:
        """What `hold` waited for is filled in."""
        with self._holding:
            self._awaited.remove(path)
            if not self._awaited:
                self.__dict__.pop("add", None)
            complete = [
                name
                for name in self.drafts
                if _is_within(path, name)
                and not any(_is_within(other, name) for other in self._awaited)
            ]
            for name in complete:
                Journal.add(self, name, self.drafts[name])  # first: a flush finds one of them
                del self.drafts[name]
                self.records -= 1  # it has been counted as a draft

    def begin(self, call: Any) -> None:
        """A call whose record so far is written as the last one, until it returns."""
        self.running[call.forward] = call
        if self._idle:
            self._stir()

    def draft(self, name: str, record: Any) -> None:
        """A record that may still change until the step ends."""
        if name not in self.drafts:
            self.records += 1
        self.drafts[name] = record
        if self._idle:
            self._stir()

    def stack(self, name: str, key: Any) -> None:
        """A line of stack.json."""
        self._stacks.append((name, key))
        if self._idle:
            self._stir()

    def _stir(self) -> None:
        # After what has come was put in its queue: a flush that begins meanwhile finds it.
        self._idle = False
        self._wake()

    def defer(self, deferred: Any, use: Callable[[Any], None]) -> None:
        """Read these values back at the next flush, all in one copy, and ``use`` them.

        None calls ``use`` as well, after what was deferred before.
        """
        self._deferred.append((deferred, use))

    def _settle_now(self) -> None:
        if self._measuring.acquire(blocking=False):  # whoever holds it does the same
            try:
                self._settle()
            finally:
                self._measuring.release()

    def _settle(self) -> None:
        """Fill in all values that are not on a device; make text of the records that waited.

        Interrupted anywhere (Ctrl-C) it can be done again: nothing is taken out before it is used.
        """
        end = len(self._done)  # before the values: those of these records are in their queue
        waiting = list(self.small)
        if waiting:
            try:
                small.fill_in(waiting)
            except Exception as error:
                self.writer.log("statistics of small tensors", error)
            for _ in waiting:
                self.small.popleft()
        if not self._deferred:
            for place in range(self._texts, end):
                name, record = self._done[place]
                if type(record) is not bytes:
                    self._done[place] = name, self._text(name, record)
            self._texts = end

    def _text(self, name: str, record: Any) -> bytes:
        try:
            return record if type(record) is bytes else lines.line(name, record)
        except Exception as error:  # an odd record costs itself, not those that come after it
            self.writer.log(name, error)
            return lines.line(name, None)

    def flush(self, compact: bool = False, *, last: bool = False) -> None:
        """Write what has been collected. Errors of the file system are logged, not raised.

        ``compact``: a window has ended; ``last``: the step has.
        """
        with self._lock:
            self._idle = True
            # Copies: the calls may go on and add their output while they become text.
            running = [(n, call, dict(call.record)) for n, call in list(self.running.items())]
            drafts = list(self.drafts.items())
            done = self._complete()
            self._tensors.wait()
            if self._discarded:
                self._forget(len(done), [])
                self.parents.clear()
                self._stacks.clear()
                return
            ended = {name for name, _ in done}
            returned, failed = _over(running, ended)
            begun = [(name, record) for name, record in failed if record]
            ended.update(name for name, _ in begun)
            draft = [(name, record) for name, _, record in running if name not in ended and record]
            drafts = [(name, record) for name, record in drafts if name not in ended]
            self._write([*done, *begun], [*draft, *drafts])
            # Only now: a flush that an exception from a signal cuts off is done again by the next.
            self._forget(len(done), [*returned, *(name for name, _ in failed)])
            for name, record in failed:
                self.incomplete.setdefault(name, _RAISED)
                self.records += bool(record)
            if compact or last:
                self._compact(last)

    def _complete(self) -> list[tuple[str, Any]]:
        """The records that are complete, with all their values."""
        with self._measuring:
            end = len(self._done)  # before the values, as in `_settle`
            self.read_back()
            return list(itertools.islice(self._done, end))

    def _forget(self, done: int, over: list[str]) -> None:
        """So many complete records have been written, and the calls of these names are over."""
        with self._measuring:
            for _ in range(done):
                self._done.popleft()
            self._texts = max(self._texts - done, 0)
        for name in over:
            self.running.pop(name, None)  # Ctrl-C may have come before the call could do it

    def read_back(self) -> None:
        """Fill in all values; those on a device come to the host in one copy."""
        with self._measuring:
            deferred = list(self._deferred)
            self._settle()
            read = iter(self._read([values for values, _ in deferred if values is not None]))
            for values, use in deferred:
                found = None if values is None else next(read, None)
                if values is None or found is not None:
                    use(found)
                self._deferred.popleft()

    def _read(self, waiting: list[Any]) -> list[Any]:
        try:
            return stats.read_back(waiting) if waiting else []
        except Exception as error:  # a device that has failed; the records stand without them
            self.writer.log("reading values back from the device", error)
            return []

    def _write(self, records: list[Any], draft: list[Any]) -> None:
        final, unfinished = [[self._text(*named) for named in part] for part in (records, draft)]
        writer, checked = self.writer, self._tensors.checked
        try:
            _hand_over(self.parents, writer.append_parents)
            _hand_over(self._stacks, lambda stacks: writer.append_stacks(stacks, callstack.render))
            writer.append(checked(final), checked(unfinished))
        except OSError as error:
            self.writer.log("writing the records", error)

    def _compact(self, last: bool) -> None:
        try:
            self.writer.compact(now=last)
        except OSError as error:
            self.writer.log("writing stack.json in compact form", error)

    def move_to(self, folder: str) -> None:
        """Go on in another folder, with all that has been written."""
        with self._lock:
            self.flush()
            self.writer.move_to(folder)

    def close(self, coverage: Mapping[str, Any]) -> None:
        """Write everything and close the files; what still arrives opens them again."""
        self.flush(last=True)  # drafts stay drafts: their gradients may come later
        self._tensors.close()
        with self._lock:
            notes = {**coverage, "records_incomplete": self.incomplete}
            try:
                self.writer.write_json("coverage.json", notes)
            finally:  # a full disk must not keep the files open
                self.writer.close()

    def discard(self) -> None:
        """Remove what was collected; what still arrives is dropped."""
        with self._lock:
            self._discarded = True
            self._tensors.discard()
            self.writer.discard()


def _is_within(path: str, name: str) -> bool:
    """Whether a place in a description belongs to record ``name``."""
    return path == name or path.startswith(name + ".")


def _over(
    running: list[tuple[str, Any, Any]], ended: set[str]
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Of the calls that are said to run: names of those that have ended, and those that failed."""
    returned, failed = [], []
    for name, call, record in running:
        if name in ended:
            returned.append(name)
        elif call.failed:
            failed.append((name, record))
        else:
            break  # failed calls keep their place behind the call they ran in
    return returned, failed


def _hand_over(queue: deque[Any], write: Callable[[list[Any]], None]) -> None:
    """Write what is in the queue. Interrupted it stays there; not if the disk is full."""
    items = list(queue)
    if not items:
        return
    try:
        write(items)
    except OSError:
        _drop(queue, len(items))
        raise
    _drop(queue, len(items))


def _drop(queue: deque[Any], count: int) -> None:
    for _ in range(count):
        queue.popleft()


def _no_stack() -> None:
    return None
