"""The values of --quantize; command lines read them, without NumPy."""

FOUR_BITS = ("int4", "int4-64", "int4-128", "nvfp4")
# What loading may quantize to (`ops.weights.quantize`). "none": nothing, and weights in few bits are multiplied out.
QUANTIZE = ("none", "int8", "fp8", *FOUR_BITS)
# Formats by their names in options → quant_method.
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")
FORMATS = {
    "awq": ("awq",),
    "gptq": ("gptq",),
    "auto-round": AUTO_ROUND,
    "compressed-tensors": ("compressed-tensors",),
    "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mixed"),
}
