"""What the package of compressed-tensors writes is read as it reads it; what it cannot write: tests/checkpoint."""

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.checkpoint.test_quantized import read_one

# Format, rows, columns, and arguments of the weights: rows and columns that fill no words, too.
CASES = [
    ("pack-quantized", 3, 64, {"num_bits": 4, "strategy": "group", "group_size": 16}),
    ("pack-quantized", 21, 64, {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    ("pack-quantized", 21, 10, {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    ("pack-quantized", 9, 10, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", 9, 10, {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", 9, 10, {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    ("mxfp4-pack-quantized", 5, 64, {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ("mxfp8-quantized", 5, 64, {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
]
DTYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize(("form", "rows", "columns", "arguments"), CASES)
def test_weights_of_the_package_are_read_as_it_reads_them(form, rows, columns, arguments):
    arguments = {"type": "int", "symmetric": True} | arguments
    weights = QuantizationArgs(**arguments, scale_dtype=torch.uint8 if form.startswith("mx") else None)
    scheme, package = (
        QuantizationScheme(targets=["Linear"], weights=weights, format=form),
        BaseCompressor.get_value_from_registry(form),
    )
    generator = torch.Generator().manual_seed(0)
    grid = {"tensor": (1,), "channel": (rows, 1)}.get(arguments["strategy"]) or (rows, columns // weights.group_size)
    weight = (torch.randn(rows, columns, generator=generator) * 0.1).to(torch.bfloat16)
    scale = (torch.rand(grid, generator=generator) + 0.5) * 0.4 / 2**weights.num_bits
    tensors = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
    if not weights.symmetric:
        tensors["weight_zero_point"] = torch.randint(-8, 8, grid, generator=generator, dtype=torch.int8)
    written = package.compress(tensors, scheme)
    # With float32 scales its products are ours.
    scale = written["weight_scale"]
    exact = written | {"weight_scale": scale.float() if scale.dtype == torch.bfloat16 else scale}
    expected = package.decompress(exact, scheme)["weight"].float().numpy()
    arrays = {
        f"x.{name}": x.view({1: torch.uint8, 2: torch.int16}[x.element_size()]).numpy().view(DTYPES[x.dtype])
        if x.dtype in DTYPES
        else x.numpy()
        for name, x in written.items()
    }
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": arguments}},
    }
    np.testing.assert_array_equal(read_one(arrays, (rows, columns), config).dense(np.float32), expected)
