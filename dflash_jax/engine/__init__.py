"""Many requests at once over one decode state: schedule → run → process. It knows token ids, and nothing of text or
HTTP."""
