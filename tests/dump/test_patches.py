from __future__ import annotations

import logging
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from msprobe.pytorch.dump.patches import Patches


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    attribute = "original"

    def own(self) -> str:
        return "own"

    @staticmethod
    def static() -> str:
        return "static"


def make_module() -> ModuleType:
    module = ModuleType("some_module")
    module.first, module.second, module.third = 1, 2, 3
    return module


def snapshot(owner: object) -> list[tuple[str, object]]:
    return list(vars(owner).items())


def same(before: list[tuple[str, object]], after: list[tuple[str, object]]) -> bool:
    """Same keys, same order, same objects."""
    return len(before) == len(after) and all(
        key == other and value is object_
        for (key, value), (other, object_) in zip(before, after, strict=True)
    )


def tensor_items() -> list[tuple[object, str, object]]:
    """1,100 or so attributes of torch and torch.Tensor, own and inherited, operators too."""
    special = ["__add__", "__radd__", "__mul__", "__getitem__", "__eq__", "__iadd__"]
    methods = [name for name in dir(torch.Tensor) if not name.startswith("_")] + special
    names = [name for name in dir(torch) if callable(getattr(torch, name)) and name.islower()]
    items: list[tuple[object, str, object]] = []
    for owner, attrs in ((torch.Tensor, methods), (torch, names[:550])):
        for attr in attrs:
            original = getattr(owner, attr)
            if callable(original):
                items.append((owner, attr, lambda *args, _f=original, **kw: _f(*args, **kw)))
    return items


def test_replaced_attribute_is_seen_and_restored() -> None:
    patches = Patches()
    assert patches.replace(Owner, "attribute", "new") == "original"
    assert Owner.attribute == "new"
    patches.restore()
    assert Owner.attribute == "original"


def test_restore_of_an_inherited_attribute_deletes_the_shadow() -> None:
    before = snapshot(Owner)
    patches = Patches()
    original = patches.replace(Owner, "inherited", lambda self: "shadow")
    assert original is Base.inherited
    assert Owner().inherited() == "shadow"
    patches.restore()
    assert "inherited" not in vars(Owner)
    assert same(before, snapshot(Owner))


def test_staticmethod_comes_back_as_a_staticmethod() -> None:
    patches = Patches()
    original = patches.replace(Owner, "static", staticmethod(lambda: "new"))
    assert isinstance(original, staticmethod)
    assert Owner.static() == "new"
    patches.restore()
    assert vars(Owner)["static"] is original


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_restore_of_a_module_keeps_keys_and_order(name: str) -> None:
    module = make_module()
    before = snapshot(module)
    patches = Patches()
    patches.replace(module, name, "new")
    assert getattr(module, name) == "new"
    patches.restore()
    assert same(before, snapshot(module))


def test_object_attribute_is_replaced_and_restored() -> None:
    thing = SimpleNamespace(value=1)
    patches = Patches()
    patches.replace(thing, "value", 2)
    assert thing.value == 2
    patches.restore()
    assert thing.value == 1


def test_missing_attribute_raises_and_installs_nothing() -> None:
    module = make_module()
    before = snapshot(module)
    patches = Patches()
    with pytest.raises(AttributeError, match="missing"):
        patches.install([(module, "first", 10), (module, "missing", 11)])
    assert same(before, snapshot(module))


def test_failed_write_takes_back_the_earlier_ones_of_the_batch() -> None:
    module = make_module()
    patches = Patches()
    with pytest.raises(TypeError, match="immutable type"):
        patches.install([(module, "first", 10), (int, "real", 11)])
    assert module.first == 1
    patches.restore()
    assert module.first == 1


def test_mapping_entry_is_replaced_and_keeps_its_place() -> None:
    mapping = {"a": 1, "b": 2, "c": 3}
    patches = Patches()
    assert patches.replace_in(mapping, "b", 20) == 2
    assert patches.replace_in(mapping, "d", 40) is None
    assert mapping == {"a": 1, "b": 20, "c": 3, "d": 40}
    patches.restore()
    assert list(mapping.items()) == [("a", 1), ("b", 2), ("c", 3)]


def test_attribute_replaced_twice_is_restored_to_the_first_original() -> None:
    patches = Patches()
    patches.replace(Owner, "attribute", "one")
    assert patches.replace(Owner, "attribute", "two") == "one"
    patches.restore()
    assert Owner.attribute == "original"


def test_restore_twice_is_a_no_op() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    patches.restore()
    module.first = 99
    patches.restore()
    assert module.first == 99


def test_restore_keeps_a_later_patch_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    patches.replace(module, "second", 20)
    module.first = "theirs"
    with caplog.at_level(logging.WARNING):
        patches.restore()
        patches.restore()
    assert (module.first, module.second) == ("theirs", 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "some_module.first" in caplog.text


def test_patch_that_others_put_back_late_goes_with_the_next_restore() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    ours, module.first = module.first, "theirs"
    patches.restore()
    module.first = ours
    patches.restore()
    assert module.first == 1


def test_undo_takes_back_one_patch_and_tells() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    patches.replace(Owner, "attribute", "new")
    assert patches.undo(Owner, "attribute")
    assert not patches.undo(Owner, "attribute")
    assert not patches.undo(module, "second")
    assert (Owner.attribute, module.first) == ("original", 10)
    assert patches.undo(module, "first")
    assert module.first == 1


def test_undo_of_a_covered_patch_leaves_it_and_returns_false() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    module.first = "theirs"
    assert not patches.undo(module, "first")
    assert module.first == "theirs"


def test_suspended_brings_originals_back_for_the_block() -> None:
    module = make_module()
    before = snapshot(module)
    patches = Patches()
    patches.replace(module, "first", 10)
    with patches.suspended():
        assert same(before, snapshot(module))
        with patches.suspended():
            assert module.first == 1
        assert module.first == 1
    assert module.first == 10
    patches.restore()
    assert same(before, snapshot(module))


def test_suspended_without_patches_does_nothing() -> None:
    patches = Patches()
    with patches.suspended():
        pass
    patches.restore()


def test_suspended_reinstalls_after_an_exception() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    with pytest.raises(KeyError), patches.suspended():
        raise KeyError
    assert module.first == 10


def test_overlapping_suspensions_of_threads_lift_until_the_last_ends() -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with patches.suspended():
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=other)
    with patches.suspended():
        thread.start()
        assert entered.wait(5)
    assert module.first == 1
    leave.set()
    thread.join()
    assert module.first == 10


def test_install_while_suspended_takes_effect_at_the_end() -> None:
    module = make_module()
    patches = Patches()
    with patches.suspended():
        patches.install([(module, "first", 10)])
        assert module.first == 1
    assert module.first == 10
    patches.restore()
    assert module.first == 1


def test_restore_while_suspended_leaves_the_originals(caplog: pytest.LogCaptureFixture) -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    with patches.suspended():
        patches.restore()
    assert module.first == 1
    assert not caplog.records


def test_patch_made_while_suspended_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    with patches.suspended():
        module.first = "theirs"
    patches.restore()
    assert module.first == "theirs"
    assert len(caplog.records) == 1


def test_patch_made_while_lifted_is_covered_anew_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = make_module()
    patches = Patches()
    patches.install([(module, "first", "ours"), (module, "second", "ours")])
    patches.lift()
    module.first = module.second = "theirs"
    patches.put_back(lambda ours, theirs: f"{ours} over {theirs}" if theirs else None)
    assert module.first == module.second == "ours over theirs"
    patches.restore()
    assert module.first == module.second == "theirs"
    assert not caplog.records


def test_patch_made_while_lifted_can_be_left_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = make_module()
    patches = Patches()
    patches.replace(module, "first", 10)
    patches.lift()
    module.first = "theirs"
    patches.put_back(lambda *_: None)
    assert module.first == "theirs"
    patches.restore()
    assert module.first == "theirs"
    assert not caplog.records


def test_torch_is_as_before_after_three_cycles() -> None:
    before_torch, before_tensor = snapshot(torch), snapshot(torch.Tensor)
    base = set(vars(torch._C.TensorBase))
    items = tensor_items()
    inherited = [a for owner, a, _ in items if owner is torch.Tensor and a not in vars(owner)]
    assert len(items) > 1000
    assert len(inherited) > 400
    patches = Patches()
    for _ in range(3):
        patches.install(items)
        assert torch.ones(2).add(1).sum().item() == 4
        with patches.suspended():
            assert same(before_tensor, snapshot(torch.Tensor))
        patches.restore()
    assert same(before_torch, snapshot(torch))
    assert same(before_tensor, snapshot(torch.Tensor))
    assert set(vars(torch._C.TensorBase)) == base


def test_cycle_of_1100_attributes_is_fast() -> None:
    """0.5 ms each on a quiet machine (measured 0.3); the bound leaves room for a loaded one."""
    items = tensor_items()
    patches = Patches()
    install_s, restore_s = [], []
    for _ in range(30):
        start = time.perf_counter()
        patches.install(items)
        middle = time.perf_counter()
        patches.restore()
        install_s.append(middle - start)
        restore_s.append(time.perf_counter() - middle)
    assert min(install_s) < 2e-3
    assert min(restore_s) < 2e-3
