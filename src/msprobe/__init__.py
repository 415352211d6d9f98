"""Precision data collection for PyTorch training and inference; see ``msprobe.pytorch``.

Importing this package imports nothing else and changes nothing.
"""

__version__ = "0.1.0"
