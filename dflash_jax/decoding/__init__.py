"""The speculative loop: pure functions over one decode state."""
