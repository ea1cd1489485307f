"""Implementations of operations that are written by hand."""
