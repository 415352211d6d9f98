"""Every name in dump.json and every file name below dump_tensor_data (pure functions)."""

from __future__ import annotations

import re
import zlib

_MAX_FILE_NAME = 255  # bytes: the limit of ext4, xfs, NTFS and APFS
_STEM = re.compile(
    r"\.\d+\.(forward|backward)\.|\.(forward|backward|parameters_grad)\.\d+\."
    r"|\.\d+\.debug(\.|$)|~[0-9a-f]{8}$"  # the last: the CRC-32 of `file_name`
)


def module_records(base: str, n: int) -> tuple[str, str]:
    """Forward and backward record name of a module; ``base`` is ``Module.<fqn>.<Class>``."""
    return f"{base}.forward.{n}", f"{base}.backward.{n}"


def parameters_grad_record(base: str, k: int) -> str:
    """Record of the ``k``-th gradient that arrived for the parameters of module ``base``."""
    return f"{base}.parameters_grad.{k}"


def repeated_backward(record: str, again: int) -> str:
    """Name of a backward record when the same graph is run once more (``retain_graph=True``).

    The first one has the plain name, later ones a further index, since a name stands once in a
    file: ``Functional.relu.0.backward``, ``Functional.relu.0.backward.1``.
    """
    return f"{record}.{again}" if again else record


def module_base(index: int | None, fqn: str, class_name: str) -> str:
    """``Module.<fqn>.<Class>``, with the position in the list when a list of models is watched."""
    return f"Module.{fqn}.{class_name}" if index is None else f"Module.{index}.{fqn}.{class_name}"


def file_name(path: str, suffix: str = ".pt") -> str:
    """A file name for the value at ``path`` that every file system accepts.

    Separators become ``_``; a name above 255 bytes is cut. Both append the CRC-32 of the whole
    path, so that two values never share a file.
    """
    name = path.replace("/", "_").replace("\\", "_").replace("\0", "_")
    encoded = name.encode("utf-8", "surrogateescape")
    if name == path and len(encoded) + len(suffix) <= _MAX_FILE_NAME:
        return name + suffix
    mark = f"~{zlib.crc32(path.encode('utf-8', 'surrogatepass')):08x}"
    room = _MAX_FILE_NAME - len(suffix) - len(mark)
    return encoded[:room].decode("utf-8", "ignore") + mark + suffix


def may_be_ours(file: str) -> bool:
    """Whether a file has a name that `file_name` gives to a value of some record."""
    stem, _, suffix = file.rpartition(".")
    return suffix in ("pt", "npy") and _STEM.search(stem) is not None
