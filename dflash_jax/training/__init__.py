"""Training: data, anchors and masks, losses, steps, evaluation. Nothing outside imports it."""
