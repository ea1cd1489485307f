"""What loading may quantize to; command lines read it, without NumPy."""

FOUR_BITS = ("int4", "int4-64", "int4-128", "nvfp4")
# The values of --quantize (`ops.weights.quantize`). "none": nothing, and weights in few bits are multiplied out.
QUANTIZE = ("none", "int8", "fp8", *FOUR_BITS)
