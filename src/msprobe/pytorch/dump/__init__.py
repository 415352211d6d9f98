"""The collector: intercept, decide, describe, write (see docs/architecture.md)."""
