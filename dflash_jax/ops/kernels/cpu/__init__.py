"""Kernels in C++, called through the foreign function interface."""
