"""What `run.py` measures, and the limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Training steps of one model in one configuration. ``limit``: ratio to the peer at most."""

    model: str
    level: str
    task: str
    summary: str
    limit: float

    @property
    def name(self) -> str:
        what = self.summary if self.task == "statistics" else self.task
        return f"{self.model} {self.level} {what}"


@dataclass(frozen=True)
class Other:
    """Another measurement. ``figures``: title, key, key of what it is divided by, limit."""

    name: str
    arguments: tuple[str, ...]
    figures: tuple[tuple[str, str, str, str], ...]
    only_ours: bool = False  # it would take the peer too long


CASES = [
    *(Case("small", level, "statistics", "statistics", 0.15) for level in ("L0", "L1", "mix")),
    *(Case("llama", level, "statistics", "statistics", 0.30) for level in ("L1", "mix")),
    *(Case("resnet", level, "statistics", "statistics", 0.30) for level in ("L1", "mix")),
    Case("wide", "L1", "statistics", "statistics", 0.35),
    Case("llama", "L1", "statistics", "md5", 0.30),
    Case("llama", "L1", "statistics", "xor", 0.30),
    Case("llama-wide", "L1", "tensor", "statistics", 0.25),
]


def others(counts: list[int]) -> list[Other]:
    """What is not a ratio of added times."""
    found = [
        Other(
            "stopped",
            ("stopped", "--seconds", "2"),
            (
                ("step after a window / plain step, small L1", "stopped_ms", "plain_ms", "1.00"),
                ("the same, CPU", "stopped_cpu_ms", "plain_cpu_ms", "1.00"),
            ),
        ),
        Other(
            "stopped",
            ("control", "--seconds", "2"),
            (("the same with nothing in between, CPU", "stopped_cpu_ms", "plain_cpu_ms", ""),),
        ),
        Other(
            "import",
            ("imported",),
            (
                ("import msprobe.pytorch, ms", "import_ms", "", "60"),
                ("the same, CPU", "import_cpu_ms", "", "60"),
            ),
        ),
    ]
    for level in ("L0", "L1", "mix"):
        pair = f"start/stop pair, 500 modules, {level}"
        figures = (
            (f"{pair}, ms", "pair_ms", "", "3"),
            ("the same, CPU", "pair_cpu_ms", "", "3"),
            ("the first pair, ms", "first_pair_ms", "", ""),
        )
        arguments = ("window", "--model", "many", "--level", level, "--steps", "20")
        found.append(Other(f"window {level}", arguments, figures))
    for count in counts:
        title = f"CPU µs per record, {count:,} in one step"
        figures = ((title, "cpu_us_per_record", "", "flat"), ("peak MB added", "peak_mb", "", ""))
        found.append(Other("growth", ("growth", "--records", str(count)), figures, count > 10_000))
    figures = (
        ("frames per F.relu, forward and backward", "frames", "", "40"),
        ("forward only", "forward_frames", "", ""),
    )
    return [*found, Other("frames", ("frames",), figures)]
