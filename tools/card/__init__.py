"""The check of a machine with an NVIDIA card: processes, stages and report."""
