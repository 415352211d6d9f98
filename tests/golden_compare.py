"""Compares the tree that a golden's script makes with the tree that mindstudio-probe 26.2.0 made.

What must agree: names, order, structure and values of forward records; ``input`` of backward
records; parameters_grad; names in construct.json and stack.json, the parents of forwards and the
frames in the script; shape and dtype of each .pt file. Values of .pt files are compared through the
statistics beside them: their bits depend on the CPU. What may differ on purpose is in the tables of
``golden_values`` (values) and in ``ADAPTATIONS`` and ``may_add`` (records), each with its reason.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from golden_values import CRC, strings_under, value_differences
from msprobe.pytorch.dump.api_dump import ops

API = re.compile(r"(?P<api>.+)\.(?P<n>\d+)\.(?P<kind>forward|backward)")
MODULE = re.compile(r"Module\..+\.(?P<kind>forward|backward|parameters_grad)\.\d+")
# The golden rewrites its file and so has room for a saved gradient beside the value; ours only
# appends (product.md 3.1), and a gradient comes when it comes.
GRADIENT = re.compile(r".+_grad\.\d+\.debug")
IN_PLACE_OUTPUT = re.compile(r"Tensor\.\w+_\.\d+\.forward\.output")
PSEUDO = {"optimizer", "clip_grad"}  # parents in construct.json that are no records
JSON_FILES = ("dump.json", "stack.json", "construct.json", "debug.json")
ERROR_LOG = "dump_error_info.log"
NOTICE = "not recorded: "  # product.md 4.7: no error, e.g. modules that were never called
NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True)
class Adaptation:
    """How one golden differs from ours on purpose. The patterns match whole record names."""

    reason: str
    extra: re.Pattern[str] = NOTHING  # records that only ours has
    absent: re.Pattern[str] = NOTHING  # records that only the golden has
    rename: tuple[str, str] = ("", "")  # in names of the golden, before anything else
    free_order: re.Pattern[str] = NOTHING  # forward records that may stand anywhere
    unchecked: re.Pattern[str] = NOTHING  # "<record>.<section>" whose numbers are not compared
    exact_checksums: bool = False
    error_log: bool = False  # ours may log what could not be computed


LITERAL = "all tensors are written down in the script, so their bits are the same on every machine"

ADAPTATIONS: dict[str, Adaptation] = {
    "arg_types": Adaptation("4.4: what cannot be encoded may be logged", error_log=True),
    "crash_in_step": Adaptation(
        "a call that raised never gets an output; the golden leaves it where it began",
        free_order=re.compile(r"Module\.2\.Linear\.forward\.0|Functional\.linear\.1\.forward"),
    ),
    "dtypes_md5": Adaptation(LITERAL, exact_checksums=True, error_log=True),
    "dtypes_xor": Adaptation(LITERAL, exact_checksums=True, error_log=True),
    "dtypes_statistics": Adaptation("4.3: null with a logged reason", error_log=True),
    "dtypes_tensor": Adaptation(LITERAL, exact_checksums=True, error_log=True),
    "gloo_collectives": Adaptation(
        "NOTES.md: the golden took the output of batch_isend_irecv before the data arrived (B28)",
        unchecked=re.compile(r"Distributed\.batch_isend_irecv\.0\.forward\.output"),
    ),
    "gloo_ddp_mix": Adaptation(
        "issue 4: under DDP, gradients of parameters are those after the all-reduce",
        unchecked=re.compile(r"Module\.module\..+\.parameters_grad\.\d+\.\w+"),
    ),
    "mlp_risk_core": Adaptation(
        "quirk B36: linear, softmax and losses are CORE",
        extra=re.compile(r"Functional\.linear\.\d\.(forward|backward)"),
    ),
    "module_dump_l0": Adaptation(
        "quirk B26: module_dump works at L0, under the user's name, and hides the submodules",
        rename=("Module.0.Net.", "Module.MyModuleOP.Net."),
        absent=re.compile(r"Module\.0\.fc[12]\.Linear\..+"),
    ),
    "repeat_start_stop": Adaptation(
        "quirk B11: a backward after stop() still belongs to the step",
        extra=re.compile(r"Module\.0\.Linear\.parameters_grad\.0"),
    ),
    "transformer_l0": Adaptation(
        "2.3: query, key and value are one tensor, whose gradient is the sum over its uses",
        unchecked=re.compile(r"Module\.layer\.self_attn\.MultiheadAttention\.backward\.0\.output"),
    ),
    **{
        name: Adaptation(
            "quirk B25: a None inside a saved structure stays null instead of dropping the whole",
            extra=re.compile(r"nested(_grad)?\.\d+\.debug"),
        )
        for name in ("save_debug_statistics", "save_debug_md5", "save_debug_tensor")
    },
}
NO_ADAPTATION = Adaptation("none")


@dataclass(frozen=True)
class Selection:
    """What the golden's config.json lets pass, as far as it decides which records ours may add."""

    everything: bool = True  # neither scope, list nor data_mode
    low_class: bool = True  # no risk_level: ours defaults to ALL, the golden's to FOCUS

    @staticmethod
    def read(path: Path) -> Selection:
        """From a config.json; without one, nothing is selected."""
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        section = config.get(config.get("task"), {})
        everything = not any(section.get(key) for key in ("scope", "list", "data_mode"))
        return Selection(everything, everything and "risk_level" not in config)


@dataclass(frozen=True)
class Folder:
    """One rank's folder of a golden and of ours, with what applies to both."""

    golden: Path
    ours: Path
    where: str
    rules: Adaptation
    selection: Selection

    def read_golden(self, file: str) -> Any:
        """A json file of the golden, with the renaming done."""
        text = (self.golden / file).read_text(encoding="utf-8")
        before, after = self.rules.rename
        return json.loads(text.replace(before, after) if before else text)

    def read_ours(self, file: str) -> Any:
        """A json file of ours; ValueError if it is not strict JSON."""
        return json.loads((self.ours / file).read_text(encoding="utf-8"), parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@cache
def added_names() -> frozenset[str]:
    """``<prefix>.<name>`` of every API that only ours records."""
    text = (ops.FOLDER / "support_wrap_ops.yaml").read_text(encoding="utf-8")
    added = yaml.safe_load(text)["added"]
    names = {f"{ops.CATEGORIES[c][0]}.{name}" for c, part in added.items() for name in part}
    # In the golden's table too, but its wrapper never got installed (data/coverage.md).
    return frozenset(names | {"VF.lstm"})


def tree_differences(name: str, golden: Path, ours: Path) -> list[str]:
    """What differs between ``<golden>`` (its ``expected``) and our tree; empty when all agrees."""
    rules = ADAPTATIONS.get(name, NO_ADAPTATION)
    theirs, mine = _rank_folders(golden), _rank_folders(ours)
    if set(theirs) != set(mine):
        return [f"folders {sorted(theirs)} expected, found {sorted(mine)}"]
    found: list[str] = []
    for where, path in theirs.items():
        config = next(p / "config.json" for p in path.parents if (p / "config.json").exists())
        folder = Folder(path, mine[where], where, rules, Selection.read(config))
        found += [f"{where}: {line}" for line in _folder_differences(folder)]
    return found


def _rank_folders(root: Path) -> dict[str, Path]:
    """Path below ``root`` with the process number left out -> folder, for each step and rank."""
    folders = [p for p in root.rglob("step*/*") if p.is_dir()]
    return {re.sub(r"proc\d+", "proc", p.relative_to(root).as_posix()): p for p in folders}


def _folder_differences(folder: Folder) -> Iterator[str]:
    for file in JSON_FILES:
        if (folder.golden / file).exists() != (folder.ours / file).exists():
            yield f"{file}: in only one of the two"
            return
    log = folder.ours / ERROR_LOG
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    errors = [line for line in lines if not line.startswith(NOTICE)]
    if errors and not folder.rules.error_log:
        yield f"{ERROR_LOG}: {errors}"
    main = "debug.json" if (folder.golden / "debug.json").exists() else "dump.json"
    golden, ours = folder.read_golden(main), folder.read_ours(main)
    yield from _header_differences(golden, ours)
    yield from _record_differences(folder, golden["data"], ours["data"])
    if (folder.golden / "stack.json").exists():
        yield from _stack_differences(folder, folder.read_golden("stack.json"))
        yield from _construct_differences(folder, ours["data"])
    yield from _file_differences(folder, ours["data"])


def _header_differences(golden: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    if list(golden) != list(ours)[: len(golden)]:
        yield f"header keys {list(golden)} expected, found {list(ours)}"
        return
    for key in golden:
        if key != "data" and _without_pid(golden[key]) != _without_pid(ours[key]):
            yield f"{key}: {golden[key]!r} expected, found {ours[key]!r}"


def _without_pid(value: Any) -> Any:
    return re.sub(r"proc\d+", "proc", value) if isinstance(value, str) else value


def kind_of(name: str) -> str:
    """forward, backward, parameters_grad, or saved for what ``PrecisionDebugger.save`` wrote."""
    match = MODULE.fullmatch(name) or API.fullmatch(name)
    return match["kind"] if match else "saved"


def twin_of(name: str) -> str:
    """The forward record of a backward one."""
    return name.replace(".backward", ".forward")


def may_add(folder: Folder, name: str, names: Collection[str]) -> bool:
    """Whether ours may have a record that the golden lacks. ``names``: all that ours has there."""
    if folder.rules.extra.fullmatch(name):
        return True
    if not folder.selection.everything:
        return False
    if kind_of(name) == "backward" and twin_of(name) in names:
        return True  # product.md 4.1: a backward of every forward that has one, in-place included
    match = API.fullmatch(name)
    if match is None or MODULE.fullmatch(name):
        return False
    prefix, _, api = match["api"].partition(".")
    low = folder.selection.low_class and ops.risk_of(prefix, api) == "LOW"
    return low or match["api"] in added_names()


def _name_differences(
    folder: Folder, golden: Collection[str], ours: Collection[str], file: str
) -> Iterator[str]:
    missing = [n for n in golden if n not in ours and not folder.rules.absent.fullmatch(n)]
    extra = [n for n in ours if n not in golden and not may_add(folder, n, ours)]
    if missing:
        yield f"{file}: lacks {missing}"
    if extra:
        yield f"{file}: has {extra} in excess"


def _record_differences(
    folder: Folder, golden: dict[str, Any], ours: dict[str, Any]
) -> Iterator[str]:
    yield from _name_differences(folder, golden, ours, "data")
    both = [n for n in golden if n in ours]
    ordered = [n for n in both if kind_of(n) in ("forward", "saved")]
    free = (GRADIENT, folder.rules.free_order)
    ordered = [n for n in ordered if not any(pattern.fullmatch(n) for pattern in free)]
    found = [n for n in ours if n in set(ordered)]
    if found != ordered:
        yield f"data: order {ordered} expected, found {found}"
    for name in both:
        yield from _one_record(folder, name, golden[name], ours[name])
    compared = {n: golden[n] for n in both if kind_of(n) == "saved"}
    for name in set(both) - set(compared):
        compared |= {f"{name}.{s}": part for s, part in _sections(folder, name, golden[name])}
    yield from _checksum_pattern(compared, ours)


def _one_record(folder: Folder, name: str, golden: Any, ours: Any) -> Iterator[str]:
    exact = folder.rules.exact_checksums
    kind = kind_of(name)
    if kind == "saved":
        yield from value_differences(golden, ours, name, exact)
        return
    # Gradients of parameters stand in the order of their arrival.
    order = sorted if kind == "parameters_grad" else list
    if order(golden) != order(ours):
        yield f"{name}: sections {list(golden)} expected, found {list(ours)}"
        return
    for section, theirs in _sections(folder, name, golden):
        # In a backward ours has a place for every argument and output, keyword arguments included.
        mine = ours[section][: len(theirs)] if kind == "backward" else ours[section]
        yield from value_differences(theirs, mine, f"{name}.{section}", exact)


def _sections(folder: Folder, name: str, golden: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a golden's record whose values ours must have."""
    # README and product.md 4.1: gradients in the order of an API's arguments are ours.
    skipped = "output" if kind_of(name) == "backward" and not MODULE.fullmatch(name) else ""
    for section, part in golden.items():
        if section != skipped and not folder.rules.unchecked.fullmatch(f"{name}.{section}"):
            yield section, part


def _checksum_pattern(golden: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """One tensor seen at two places has one checksum at both, whatever its bits are here."""
    mine = dict(strings_under("md5", ours))  # "<record>.<section>.<place>" -> checksum
    first: dict[str, str] = {}
    for place, checksum in strings_under("md5", golden):
        if IN_PLACE_OUTPUT.match(place):
            continue  # product.md 4.2: taken after the call; the golden repeats that of the input
        at = first.setdefault(checksum, place)
        if place in mine and at in mine and mine[place] != mine[at]:
            yield f"{place}: {mine[place]}, but {mine[at]} at {at}; the golden has one checksum"


def _stack_differences(folder: Folder, golden: dict[str, Any]) -> Iterator[str]:
    ours = folder.read_ours("stack.json")
    if list(ours) != [str(i) for i in range(len(ours))]:
        yield f"stack.json: keys {list(ours)}"
    if len({tuple(frames) for _, frames in ours.values()}) != len(ours):
        yield "stack.json: one stack is written twice"
    theirs, mine = _frames(golden), _frames(ours)
    yield from _name_differences(folder, theirs, mine, "stack.json")
    for name in theirs:
        if name in mine and theirs[name] != mine[name]:
            yield f"stack.json: {name}: {theirs[name]} expected, found {mine[name]}"


FRAME = re.compile(r"File (?P<file>.+), line (?P<line>\d+), in (?P<function>.+), \n ?(?P<text>.*)")


def _frames(stack: dict[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """Record -> (line, function, source) of its frames in script.py, innermost first."""
    found = {}
    for names, frames in stack.values():
        parts = [FRAME.fullmatch(frame) for frame in frames]
        wrong = [frame for frame, part in zip(frames, parts, strict=True) if part is None]
        if wrong:
            raise ValueError(f"stack.json: not of the documented form: {wrong}")
        own = [part for part in parts if part and Path(part["file"]).name == "script.py"]
        # The goldens' ranks were spawned; ours are forked: the line that forks is on their stack.
        own = [part for part in own if not part["text"].startswith("mp.start_processes(")]
        found.update(
            {name: [(p["line"], p["function"], p["text"]) for p in own] for name in names}
        )
    return found


def _construct_differences(folder: Folder, data: dict[str, Any]) -> Iterator[str]:
    golden, ours = folder.read_golden("construct.json"), folder.read_ours("construct.json")
    if golden:
        # Records of dump.json have been judged there.
        judged = [n for n in ours if n in golden or not (n in data or n in PSEUDO)]
        yield from _name_differences(folder, golden, judged, "construct.json")
    elif ours:
        yield f"construct.json: {{}} expected (level L1), found {ours}"
    for name in golden.keys() & ours.keys():
        allowed = {golden[name]}
        if kind_of(name) == "backward" and twin_of(name) in ours:
            # product.md 5: always the backward of the forward's parent; the golden's is wrong after
            # in-place modules and null for the first layer.
            allowed.add(_backward_of(ours[twin_of(name)]))
        if ours[name] not in allowed:
            yield f"construct.json: {name}: parent {golden[name]} expected, found {ours[name]}"


def _backward_of(parent: str | None) -> str | None:
    return parent.replace(".forward.", ".backward.") if parent else None


def _file_differences(folder: Folder, data: dict[str, Any]) -> Iterator[str]:
    tensors = folder.ours / "dump_tensor_data"
    present = {p.name for p in tensors.iterdir()} if tensors.exists() else set()
    named = dict(strings_under("data_name", data))
    if present != set(named.values()):
        missing, unknown = set(named.values()) - present, present - set(named.values())
        yield f".pt files {sorted(missing)} are missing, {sorted(unknown)} unknown"
    for place, checksum in strings_under("md5", data):
        file = named.get(place)
        if CRC.fullmatch(checksum) and file in present and crc_of(tensors / file) != checksum:
            yield f"{place}: {checksum}, but {file} has {crc_of(tensors / file)}"
    yield from _manifest_differences(folder, tensors, present)


def _manifest_differences(folder: Folder, tensors: Path, present: set[str]) -> Iterator[str]:
    path = folder.golden / "pt_manifest.json"
    manifest = folder.read_golden("pt_manifest.json") if path.exists() else {}
    first: dict[str, str] = {}
    for file, expected in manifest.items():
        if _is_ours(file) or folder.rules.absent.fullmatch(file):
            continue
        if file not in present:
            yield f"{file}: missing"
            continue
        yield from _one_file(tensors / file, expected, folder.rules.exact_checksums)
        # As in _checksum_pattern: the same tensor at two places has the same bytes at both.
        if folder.rules.unchecked.match(file):
            continue
        at = first.setdefault(expected["crc32"], file)
        if crc_of(tensors / file) != crc_of(tensors / at):
            yield f"{file}: differs from {at}, which it equals in the golden"


def _is_ours(file: str) -> bool:
    """Whether a file belongs to the ``output`` of an API's backward record, which is ours."""
    record, _, _ = file.partition(".output.")
    return kind_of(record) == "backward" and not MODULE.fullmatch(record)


def _one_file(path: Path, expected: dict[str, Any], exact: bool) -> Iterator[str]:
    tensor = torch.load(path, weights_only=True)
    found = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
        "type": type(tensor).__name__,
    }
    if exact:
        found["crc32"] = crc_of(path)
    if any(expected[key] != value for key, value in found.items()):
        yield f"{path.name}: {expected} expected, found {found}"


def crc_of(path: Path) -> str:
    """CRC-32 of the elements of a .pt file, in C order."""
    tensor = torch.load(path, weights_only=True)
    contents = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{zlib.crc32(contents):08x}"
