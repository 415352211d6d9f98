"""Interception of torch functions and Tensor methods."""
