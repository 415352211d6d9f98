"""Cost of the statistics and checksums of one CPU tensor, against plain torch and zlib.

    python benchmarks/bench_stats.py [--threads 1] [--sizes 64 4096 ...] [--seconds 0.2]

Each figure is the best of many short rounds; ours and the plain one run in turn, so that a busy
machine is unfair to neither. ``GB/s``: bytes of the tensor over our time.
"""

from __future__ import annotations

import argparse
import platform
import time
import zlib
from collections.abc import Callable, Sequence

import torch

from msprobe.pytorch.dump import checksums, stats

SIZES = (1, 64, 4096, 65536, 1 << 20, 1 << 24)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.bool)


def plain_statistics(t: torch.Tensor) -> list[float]:
    return [t.max().item(), t.min().item(), t.mean().item(), t.norm().item()]


def plain_extremes(t: torch.Tensor) -> list[float]:
    return [t.max().item(), t.min().item()]


def plain_crc32(t: torch.Tensor) -> str:
    return f"{zlib.crc32(t.contiguous().view(-1).view(torch.uint8).numpy()):08x}"


def best_times(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds per call of each, the best of rounds made in turn for ``seconds`` per call."""
    counts = []
    for call in calls:
        call()
        begin = time.perf_counter()
        call()
        counts.append(max(1, int(0.0005 / (time.perf_counter() - begin))))
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds * len(calls)
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            for _ in range(counts[i]):
                call()
            best[i] = min(best[i], (time.perf_counter() - begin) / counts[i])
    return best


Measure = Callable[[torch.Tensor], object]


def row(name: str, tensor: torch.Tensor, ours: Measure, plain: Measure, seconds: float) -> None:
    mine, other = best_times([lambda: ours(tensor), lambda: plain(tensor)], seconds)
    size = tensor.numel() * tensor.element_size()
    print(
        f"{name:34} {tuple(tensor.shape)!s:>18} {mine * 1e6:12.2f} {other * 1e6:12.2f} "
        f"{mine / other:6.2f} {size / mine / 1e9:7.2f}"
    )


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.randn(2048, 2048).to(dtype)
    return {
        "transposed": base.t(),
        "channels_last": base.view(16, 32, 128, 64).permute(0, 3, 1, 2),
        "every second": base[:, ::2],
        "inner rows": base[:, 512:1536],
        "heads": base.view(16, 128, 32, 64).transpose(1, 2)[:, ::3],
        "expanded": base[:, :1].expand(-1, 2048),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="elements")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    crc = checksums._crc32.__module__ or "zlib"
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, ",
        end="",
    )
    print(f"torch {torch.__version__}, {args.threads} thread(s), CRC by {crc}")
    print(f"{'':34} {'shape':>18} {'ours us':>12} {'plain us':>12} {'ratio':>6} {'GB/s':>7}")
    for dtype in (*FLOATS, *OTHERS):
        plain = plain_statistics if dtype.is_floating_point else plain_extremes
        for size in args.sizes:
            tensor = (torch.randn(size) * 50).to(dtype)
            row(f"statistics {dtype}", tensor, stats.statistics, plain, args.seconds)
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in layouts(dtype).items():
            row(f"{name} {dtype}", tensor, stats.statistics, plain_statistics, args.seconds)
    for size in args.sizes:
        row("crc32", torch.randn(size), stats.crc32, plain_crc32, args.seconds)
    for size in args.sizes:
        row("xor64, against crc32", torch.randn(size), stats.xor64, plain_crc32, args.seconds)


if __name__ == "__main__":
    main()
