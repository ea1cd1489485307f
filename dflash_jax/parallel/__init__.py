"""The device mesh, shardings and processes."""
