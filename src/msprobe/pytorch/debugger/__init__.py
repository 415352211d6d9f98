"""The facade. ``precision_debugger`` is the import path that verl-omni and older recipes use."""

from .precision_debugger import PrecisionDebugger, module_dump, module_dump_end

__all__ = ["PrecisionDebugger", "module_dump", "module_dump_end"]
