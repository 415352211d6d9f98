"""Compares one value of a golden's json with ours, by the rules for numbers, null and encodings.

Every place where product.md overrules what the golden shows is a row of ``OVERRULED``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

STATISTICS = ("Max", "Min", "Mean", "Norm")
SIXTEEN_BIT = ("torch.float16", "torch.bfloat16")
INTEGER = re.compile(r"torch\.u?int\d+")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
CRC = re.compile(r"[0-9a-f]{8}")
XOR = re.compile(r"0x[0-9a-f]{16}")

# RELATIVE: the rules for comparing. The sums behind a small value are of the size of the whole
# tensor, so CPUs with other vector widths differ by some rounding errors of that size (OF_LARGEST),
# and a gradient that is zero in exact arithmetic (the bias of a convolution before a BatchNorm) is
# nothing but rounding error (ABSOLUTE).
RELATIVE, RELATIVE_16_BIT = 2e-5, 2e-2
OF_LARGEST, OF_LARGEST_16_BIT = 2e-6, 2e-3
ABSOLUTE = 2e-7


def _is_dtype_or_device(golden: Any, ours: Any) -> bool:
    known = {"torch.dtype": str, "torch.device": (str, int)}
    return (
        golden == {}
        and isinstance(ours, dict)
        and set(ours) == {"type", "value"}
        and isinstance(ours["value"], known.get(ours["type"], ()))
    )


def _is_device_without_index(golden: Any, ours: Any) -> bool:
    if not (isinstance(golden, dict) and golden.get("type") == "torch.device"):
        return False
    shortened = str(golden["value"]).removesuffix(":None")
    return bool(ours == {"type": "torch.device", "value": shortened})


# (what product.md says instead, whether this golden value and ours are such a case)
OVERRULED: list[tuple[str, Callable[[Any, Any], bool]]] = [
    ("README: null in the golden may be a value in ours", lambda golden, ours: golden is None),
    ("4.4: dtype and device are encoded the same wherever they stand", _is_dtype_or_device),
    ("4.4: a device without index has no ':None'", _is_device_without_index),
]


def value_differences(
    golden: Any, ours: Any, where: str, exact_checksums: bool = False
) -> Iterator[str]:
    """What differs, one line each; nothing when ours is as the golden demands.

    ``exact_checksums``: md5 and xor are equal, not only well-formed. The last bits of computed
    tensors differ between CPUs (those of the goldens' linear layers do), so this can hold only for
    tensors whose elements the script writes down.
    """
    if any(holds(golden, ours) for _, holds in OVERRULED):
        return
    if is_tensor(golden):
        yield from _tensor_differences(golden, ours, where, exact_checksums)
    elif isinstance(golden, dict | list) and type(ours) is type(golden):
        theirs, mine = _parts(golden), _parts(ours)
        if list(theirs) != list(mine):
            yield f"{where}: {list(theirs)} expected, found {list(mine)}"
            return
        for key, part in theirs.items():
            yield from value_differences(part, mine[key], f"{where}.{key}", exact_checksums)
    elif not _same_number(golden, ours, 0.0, 0.0):
        yield f"{where}: {golden!r} expected, found {ours!r}"


def _parts(value: dict[str, Any] | list[Any]) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value))


def is_tensor(value: Any) -> bool:
    """Whether an entry describes a tensor or a numpy array."""
    return isinstance(value, dict) and {"type", "dtype", "shape"} <= set(value)


def strings_under(key: str, value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """(place, string) of each string that stands under ``key`` anywhere in a value."""
    if not isinstance(value, dict | list):
        return
    for name, part in _parts(value).items():
        if name == key and isinstance(part, str):
            yield where, part
        yield from strings_under(key, part, f"{where}.{name}" if where else str(name))


def _tensor_differences(
    golden: dict[str, Any], ours: Any, where: str, exact_checksums: bool
) -> Iterator[str]:
    if not is_tensor(ours) or set(golden) - {"data_name"} != set(ours) - {"data_name"}:
        yield f"{where}: an entry with {list(golden)} expected, found {ours!r}"
        return
    for key in golden:
        if key in STATISTICS:
            same = _same_statistic(key, golden, ours)
        elif key == "md5":
            same = _same_checksum(golden[key], ours[key], exact_checksums)
        else:  # whether a .pt file exists is compared with the files
            same = key == "data_name" or golden[key] == ours[key]
        if not same:
            yield f"{where}.{key}: {golden[key]!r} expected, found {ours[key]!r}"


def _same_statistic(key: str, golden: dict[str, Any], ours: dict[str, Any]) -> bool:
    expected, found = golden[key], ours[key]
    if expected is None:
        return True
    if not golden["shape"] and key in ("Mean", "Norm"):
        # product.md 4.3: integers have neither; here the golden has the value itself in both.
        if found is None and INTEGER.fullmatch(golden["dtype"]):
            return True
        if key == "Norm":  # product.md 4.3: the absolute value; the golden has the value itself
            expected = abs(expected)
    small = golden["dtype"] in SIXTEEN_BIT
    largest = max((abs(v) for v in (golden["Max"], golden["Min"]) if _is_finite(v)), default=0.0)
    slack = largest * (OF_LARGEST_16_BIT if small else OF_LARGEST)
    exact = isinstance(expected, int)
    return _same_number(
        expected,
        found,
        0.0 if exact else RELATIVE_16_BIT if small else RELATIVE,
        0.0 if exact else slack + ABSOLUTE,
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same_number(expected: Any, found: Any, relative: float, absolute: float) -> bool:
    """Equal and of one type; a non-finite number may be written as a string in ours."""
    if isinstance(expected, float) and not math.isfinite(expected):
        found = NON_FINITE.get(found, found) if isinstance(found, str) else found
        return isinstance(found, float) and (
            found == expected or (math.isnan(found) and math.isnan(expected))
        )
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, found, rel_tol=relative, abs_tol=absolute)
    return bool(expected == found)


def _same_checksum(golden: Any, ours: Any, exact: bool) -> bool:
    if golden is None:
        return True
    if not isinstance(golden, str):
        # quirk B3: xor of a float without dimensions is the value itself; ours is a checksum.
        return isinstance(ours, str) and bool(XOR.fullmatch(ours))
    pattern = CRC if CRC.fullmatch(golden) else XOR
    return isinstance(ours, str) and bool(pattern.fullmatch(ours)) and (
        ours == golden or not exact
    )
