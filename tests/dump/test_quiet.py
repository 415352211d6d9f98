"""Questions that are asked for every call have an answer wherever the program runs."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

from msprobe.pytorch.dump import compilers, quiet
from msprobe.pytorch.random_calls import RandomCall


@pytest.mark.parametrize("in_use", [False, True], ids=["unused", "in use"])
def test_cuda_that_cannot_be_asked_captures_nothing(in_use, monkeypatch) -> None:
    """A build with CUDA on a machine without a driver; a child that was forked from one with it."""

    def raising() -> bool:
        raise RuntimeError(
            "CUDA error: CUDA driver version is insufficient for CUDA runtime version"
        )

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", raising, raising=False)
    monkeypatch.setattr(quiet, "_cuda_is_initialized", lambda: in_use)
    assert quiet._is_capturing() is False


@pytest.mark.parametrize("answer", [False, True])
def test_cuda_in_use_is_asked(answer, monkeypatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: answer, raising=False)
    monkeypatch.setattr(quiet, "_cuda_is_initialized", lambda: True)
    assert quiet._is_capturing() is answer


def test_warnings_of_torch_about_its_own_names_do_not_reach_the_user(monkeypatch) -> None:
    """torch 2.1 warns of ``torch.has_cuda`` and others when it lists what can be overridden."""
    listed = []

    def list_them() -> dict[object, list[object]]:
        listed.append(True)
        warnings.warn("'has_cuda' is deprecated", stacklevel=2)
        return {}

    monkeypatch.setattr(torch.overrides, "get_overridable_functions", list_them)
    compilers.prime_torch_caches()  # pytest makes an error of a warning
    assert listed


def test_dynamo_may_refer_weakly_to_what_a_wrapper_holds() -> None:
    call = RandomCall("torch", "rand", torch.rand)
    assert weakref.ref(call)() is call
