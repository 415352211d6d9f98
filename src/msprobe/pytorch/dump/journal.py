"""What one step has collected and not yet written, and the writing of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from . import callstack, jsonfile, stats
from .background import Background
from .writer import Writer

_RAISED = "it raised an exception, or the window closed before it returned"
_NOT_RETURNED = "it had not returned when the step ended"


class Journal:
    """Queues between the threads that record and whoever flushes.

    Recording takes no lock: deques and dicts change atomically. A flush takes the queues over in
    an order that loses nothing: first what is running, then what is done, then the values.
    """

    def __init__(
        self, writer: Writer, wake: Callable[[], None], background: Background | None = None
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
        self._lock = threading.RLock()
        self._discarded = False
        self._background = background
        self._unsaved: set[str] = set()  # files that could not be written in the background

    def add(self, name: str, record: Any) -> None:
        """A complete record.

        It becomes text at once unless it waits for values on a device: thousands of dicts and
        lists that live until the next flush would keep the garbage collector busy.
        """
        self.records += 1
        self._done.append((name, record if self._deferred else jsonfile.member(name, record)))
        if self._idle:
            self._stir()

    def begin(self, call: Any) -> None:
        """A call whose record so far is written as the last one, until it returns."""
        self.running[call.forward] = call
        if self._idle:
            self._stir()

    def draft(self, name: str, record: Any) -> None:
        """A record that may still change until the step ends."""
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

    def save_tensor(self, path: str, tensor: Any) -> str:
        """Write a tensor that nobody else changes; the name of its file.

        At once, or with async_dump in the background. In either case the file is complete before
        its record is written. An error at once is raised; a later one takes the name out again.
        """
        name = self.writer.tensor_name(path, tensor)
        if self._background is None:
            self.writer.save_tensor(name, tensor)
        else:
            size_bytes = int(tensor.nbytes)
            self._background.submit(size_bytes, lambda: self._save_later(path, name, tensor))
        return name

    def _save_later(self, path: str, name: str, tensor: Any) -> None:
        try:
            self.writer.save_tensor(name, tensor)
        except Exception as error:
            self.writer.log(path, error)
            self._unsaved.add(name)

    def _without_unsaved(self, records: list[Any]) -> list[Any]:
        """The lines of ``records`` without the names of files that could not be written."""
        names = {jsonfile.encode(name): name for name in self._unsaved}
        lines = []
        for name, record in records:
            line = record if type(record) is bytes else jsonfile.member(name, record)
            for text in names:
                line = line.replace(f'"data_name": {text}'.encode(), b'"data_name": null')
            lines.append((name, line))
        return lines

    def flush(self, compact: bool = False, *, last: bool = False) -> None:
        """Write what has been collected. Errors of the file system are logged, not raised.

        ``compact``: a window has ended; ``last``: the step has.
        """
        with self._lock:
            self._idle = True
            running = list(self.running.items())
            records = _drain(self._done)
            self.read_back()
            if self._background is not None:
                self._background.wait()
                if self._unsaved:
                    records = self._without_unsaved(records)
            if self._discarded:
                self.parents.clear()
                self._stacks.clear()
                return
            for name, call in running:
                if not call.failed:
                    break  # failed calls keep their place behind the call they ran in
                self.running.pop(name, None)
                self.incomplete.setdefault(name, _RAISED)
                if call.record:
                    self.records += 1
                    records.append((name, call.record))
            ended = {name for name, _ in records}
            # Copies: the call may go on and add its output while they become text.
            draft = [(n, dict(c.record)) for n, c in running if n not in ended and c.record]
            self._write(records, [*draft, *list(self.drafts.items())])
            if compact or last:
                self._compact(last)

    def read_back(self) -> None:
        """Bring all values that are still on a device to the host, in one copy."""
        deferred = _drain(self._deferred)
        waiting = [values for values, _ in deferred if values is not None]
        read = iter(stats.read_back(waiting) if waiting else ())
        for values, use in deferred:
            use(None if values is None else next(read))

    def _write(self, records: list[Any], draft: list[Any]) -> None:
        try:
            self.writer.append(
                records, draft, _drain(self.parents), _drain(self._stacks), callstack.render
            )
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
        for name, call in list(self.running.items()):
            if not call.failed:
                self.incomplete[name] = _NOT_RETURNED
            call.failed = True
        self.flush(last=True)  # drafts stay drafts: their gradients may come later
        with self._lock:
            notes = {**coverage, "records_incomplete": self.incomplete}
            self.writer.write_json("coverage.json", notes)
            self.writer.close()

    def discard(self) -> None:
        """Remove what was collected; what still arrives is dropped."""
        with self._lock:
            self._discarded = True
            self.writer.discard()


def _drain(queue: deque[Any]) -> list[Any]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items


def _no_stack() -> None:
    return None
