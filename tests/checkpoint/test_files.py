"""Tensors of safetensors files at any place of theirs."""

import tracemalloc

import numpy as np
import pytest

from dflash_jax.checkpoint.files import TensorFiles


@pytest.mark.parametrize("odd", [0, 1])
def test_some_rows_of_a_tensor_take_the_memory_of_those_rows(odd, tmp_path):
    """Also where the header has an odd length: the numbers are not aligned then."""
    array = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    header = b'{"a":{"dtype":"F32","shape":[1024,1024],"data_offsets":[0,%d]}}' % array.nbytes
    header += b" " * (-len(header) % 8 + odd)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + array.tobytes())
    files = TensorFiles(tmp_path)
    tracemalloc.start()
    part = files.section("a", array.shape, slice(10, 20), slice(3, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.flags.aligned
    assert peak < 2 * part.nbytes
    np.testing.assert_array_equal(part, array[10:20, 3:1000])
    np.testing.assert_array_equal(files.read("a"), array)
    assert files.read("a").flags.aligned
