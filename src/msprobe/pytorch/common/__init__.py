"""Old import path of `seed_all`; its home is ``msprobe.pytorch``."""

from ..seed import seed_all

__all__ = ["seed_all"]
