"""Interception of ``nn.Module`` calls."""
