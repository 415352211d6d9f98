"""Record what a PyTorch model computes. Importing this changes nothing in torch."""

from __future__ import annotations

from .debugger import PrecisionDebugger, module_dump, module_dump_end
from .random_save import random_save
from .seed import seed_all

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end", "random_save", "seed_all"]
