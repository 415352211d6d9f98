"""Which records 177 expressions give: the names of mindstudio-probe 26.2.0 plus our additions.

``data/name_facts_script.py`` runs each expression in a step of its own, at risk level ALL and at
the default; ``data/name_facts_expected.json`` has the names that the observed tool wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden_compare import added_names, kind_of, twin_of
from runner import run_script

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, dict[str, list[str]]] = json.loads(
    (DATA / "name_facts_expected.json").read_text(encoding="utf-8")
)

# expression -> (why ours differs, the names ours gives)
OVERRULED: dict[str, tuple[str, list[str]]] = {
    "repr(x)": ("product.md 4.5: formatting a tensor records nothing", []),
    "nn.TransformerEncoderLayer fast path (eval, no_grad)": (
        "name_facts.md, 'not to copy': the observed tool prevents the fused kernel",
        ["Torch._transformer_encoder_layer_fwd.0.forward"],
    ),
    "funcol.all_reduce(x, 'sum', WORLD) + 0": (
        "the stride() inside is torch's own: its record read memory that was being received",
        ["Distributed._functional_collectives.all_reduce.0.forward", "Tensor.__add__.0.forward"],
    ),
    **{
        f"torch.compile(relu(x @ y) + 1, backend='{backend}')": (
            "product.md 2.9: a compiled region runs as one opaque call, its backward as well",
            [],
        )
        for backend in ("eager", "aot_eager")
    },
}


def difference(expression: str, ours: list[str]) -> str:
    """What is wrong with our names for an expression; "" when nothing is."""
    if expression in OVERRULED:
        expected = OVERRULED[expression][1]
        return "" if ours == expected else f"{expected} expected, found {ours}"
    # The default risk level is ALL here (FOCUS there), so both runs must give the names of ALL.
    expected = EXPECTED["risk_ALL"][expression]
    missing = [name for name in expected if name not in ours]
    if missing:
        return f"lacks {missing}, found {ours}"
    extra = [n for n in ours if n not in expected and not is_addition(n, ours)]
    if extra or len(set(ours)) != len(ours):
        return f"{extra} in excess or twice, found {ours}"
    forwards = [name for name in expected if kind_of(name) == "forward"]
    if forwards != [name for name in ours if name in forwards]:
        return f"order {forwards} expected, found {ours}"
    return ""


def is_addition(name: str, ours: list[str]) -> bool:
    """A function that only our table has, or the gradients of a forward record (product.md 4.1)."""
    api = name.rsplit(".", 2)[0]
    is_mirror = kind_of(name) == "backward" and twin_of(name) in ours
    return is_mirror or api in added_names()


def names_of(group: str, risk: str, folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    args = [str(folder), "--child", group, risk, str(result)]
    code, output = run_script(DATA / "name_facts_script.py", args, folder)
    assert code == 0, output
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    assert found["errors"] == {}
    return found["res"]


@pytest.mark.parametrize("risk", ["ALL", "default"])
@pytest.mark.parametrize(
    "group", ["main", "compile", pytest.param("dist", marks=pytest.mark.distributed)]
)
def test_expressions_give_the_observed_names(group: str, risk: str, tmp_path: Path) -> None:
    ours = names_of(group, risk, tmp_path)
    assert set(ours) <= set(EXPECTED["risk_ALL"])
    found = {expression: difference(expression, names) for expression, names in ours.items()}
    assert {expression: text for expression, text in found.items() if text} == {}


def test_overruled_expressions_exist() -> None:
    assert set(OVERRULED) <= set(EXPECTED["risk_ALL"])


ADD = "x + y"


@pytest.mark.parametrize(
    ("expression", "names", "accepted"),
    [
        (ADD, ["Tensor.__add__.0.forward", "Tensor.__add__.0.backward"], True),
        (ADD, ["Tensor.__add__.0.forward"], False),
        (ADD, ["Tensor.__add__.1.forward", "Tensor.__add__.1.backward"], False),
        (ADD, ["Tensor.__add__.0.forward", "Tensor.__add__.0.backward", "Tensor.add.0.forward"], 0),
        ("-x", ["Tensor.__neg__.0.forward", "Tensor.__neg__.0.backward"], True),
        ("-x", ["Tensor.neg.0.forward"], False),
        ("torch.fft.fft(x)", ["Torch.fft.fft.0.forward"], True),
        ("x.float() (already float32)", ["Tensor.float.0.forward", "Tensor.float.0.backward"], 1),
        ("repr(x)", EXPECTED["risk_ALL"]["repr(x)"], False),
        (
            "1 / x",
            ["Tensor.__mul__.0.forward", "Tensor.reciprocal.0.forward"],
            False,
        ),
    ],
)
def test_difference_reports_wrong_names_only(
    expression: str, names: list[str], accepted: bool
) -> None:
    assert (difference(expression, names) == "") == bool(accepted)
