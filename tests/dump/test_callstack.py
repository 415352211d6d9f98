from __future__ import annotations

import gc
import inspect
import linecache
import os
import sys
import traceback
import weakref
from collections.abc import Callable

import pytest

from msprobe.pytorch.dump import callstack
from msprobe.pytorch.dump.callstack import capture, render

HERE = os.path.abspath(__file__)


def outer(call: Callable[[], callstack.Key]) -> callstack.Key:
    return call()


def recurse(depth: int) -> callstack.Key:
    return capture() if depth == 0 else recurse(depth - 1)


def line_of(function: Callable[..., object], offset: int = 1) -> int:
    return inspect.getsourcelines(function)[1] + offset


def test_frame_text_has_path_line_function_and_source() -> None:
    assert render(recurse(0))[0] == (
        f"File {HERE}, line {line_of(recurse)}, in recurse, \n "
        "return capture() if depth == 0 else recurse(depth - 1)"
    )


def test_frames_stand_innermost_first_down_to_the_start() -> None:
    functions = [text.split(", in ")[1].split(", \n")[0] for text in render(recurse(2))]
    assert functions[:4] == [
        "recurse", "recurse", "recurse", "test_frames_stand_innermost_first_down_to_the_start",
    ]
    outermost = sys._getframe()
    while outermost.f_back:
        outermost = outermost.f_back
    assert functions[-1] == outermost.f_code.co_name


def test_lines_agree_with_traceback() -> None:
    """The standard library walks the same stack by another way (f_lineno)."""
    key, expected = capture(), traceback.extract_stack()
    assert render(key) == [
        f"File {frame.filename}, line {frame.lineno}, in {frame.name}, \n {frame.line}"
        for frame in reversed(expected)
    ]


def test_same_place_gives_the_same_key_and_another_line_another() -> None:
    keys = [recurse(1) for _ in range(2)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    assert recurse(1) != keys[0]


def test_two_calls_on_different_lines_of_one_statement_differ() -> None:
    pair = (
        recurse(0),
        recurse(0),
    )
    first, second = (render(key)[1] for key in pair)
    line = int(first.split("line ")[1].split(",")[0])
    assert f"line {line + 1}," in second


def test_frames_of_our_package_are_skipped() -> None:
    namespace: dict[str, Callable[..., callstack.Key]] = {}
    ours = os.path.join(callstack.PACKAGE_DIR, "pytorch", "made_up.py")
    exec(compile("def call(f): return f()", ours, "exec"), namespace)
    texts = render(outer(lambda: namespace["call"](lambda: recurse(0))))
    assert not [text for text in texts if callstack.PACKAGE_DIR in text]
    assert [text.split(", in ")[1].split(",")[0] for text in texts[:4]] == [
        "recurse", "<lambda>", "<lambda>", "outer",
    ]


def test_skip_prefix_replaces_the_package() -> None:
    texts = render(capture(skip_prefix=os.path.dirname(HERE) + os.sep))
    assert texts
    assert not [text for text in texts if HERE in text]


def test_package_dir_is_the_one_of_msprobe() -> None:
    import msprobe

    assert msprobe.__path__[0] + os.sep == callstack.PACKAGE_DIR


def test_code_without_source_has_an_empty_last_part() -> None:
    namespace: dict[str, Callable[..., callstack.Key]] = {}
    exec(compile("def hidden(f):\n return f()", "<made up>", "exec"), namespace)
    assert render(namespace["hidden"](lambda: capture()))[1] == (
        "File <made up>, line 2, in hidden, \n "
    )


def test_relative_file_name_becomes_absolute(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    namespace: dict[str, Callable[..., callstack.Key]] = {}
    exec(compile("def f(c): return c()", "relative.py", "exec"), namespace)
    text = render(namespace["f"](lambda: capture()))[1]
    assert text.startswith(f"File {os.path.join(str(tmp_path), 'relative.py')}, line 1, in f, ")


def test_source_known_to_linecache_only_is_shown() -> None:
    """As in notebooks and torch.fx, which register their generated code there."""
    source = "def generated(f):\n    return f()  # here\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    namespace: dict[str, Callable[..., callstack.Key]] = {}
    exec(compile(source, "<cell 1>", "exec"), namespace)
    assert render(namespace["generated"](lambda: capture()))[1].endswith(
        ", in generated, \n return f()  # here"
    )
    del linecache.cache["<cell 1>"]


def test_capture_keeps_no_frame_alive() -> None:
    class Big:
        pass

    def call() -> tuple[callstack.Key, weakref.ref[Big]]:
        big = Big()
        return capture(), weakref.ref(big)

    gc.disable()
    try:
        key, reference = call()
        assert reference() is None
    finally:
        gc.enable()
    assert key


def test_keys_of_discarded_functions_never_collide() -> None:
    """Ids of dead code objects are given to new ones; a key keeps its code, so its text stays."""
    keys, wanted = [], []
    for number in range(200):
        namespace: dict[str, Callable[..., callstack.Key]] = {}
        exec(compile(f"def f{number}(c): return c()", "<many>", "exec"), namespace)
        keys.append(namespace[f"f{number}"](lambda: capture()))
        wanted.append(f"in f{number}, ")
        del namespace
    assert len(set(keys)) == 200
    assert not [
        text for key, text in zip(keys, wanted, strict=True) if text not in render(key)[1]
    ]


def test_full_cache_is_dropped_and_keys_stay_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callstack, "_MAX_CACHED_KEYS", 3)
    keys = [recurse(depth) for depth in range(8)]
    assert [len(render(key)) - len(render(keys[0])) for key in keys] == list(range(8))
    assert len(callstack._keys) <= 3


def test_capture_inside_a_thread_ends_at_the_thread() -> None:
    import threading

    keys: list[callstack.Key] = []
    thread = threading.Thread(target=lambda: keys.append(capture()))
    thread.start()
    thread.join()
    assert "in _bootstrap" in render(keys[0])[-1]
    assert sys._getframe().f_code.co_name not in "".join(render(keys[0]))
