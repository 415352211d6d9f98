"""Old import path of `seed_all` (verl-omni); its home is ``msprobe.pytorch``."""

from ..seed import seed_all

__all__ = ["seed_all"]
