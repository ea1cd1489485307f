"""Training of drafters: data, anchors and masks, losses, steps and evaluation.

Only entry points import this package.
"""
