"""Decoding at real shapes, part by part, beside the bandwidth floor."""
