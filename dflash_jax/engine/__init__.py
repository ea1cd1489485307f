"""Many requests at once over one decoding state: schedule, run, process results.

The engine handles token ids. Text belongs to `frontend`, HTTP to `server`. A block is what a round verifies: the drafts
and the target's own token, so that its size is the draft length + 1.
"""
