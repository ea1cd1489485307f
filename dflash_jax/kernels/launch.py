"""How a Triton kernel is called: through jax-triton."""

from collections.abc import Sequence


def triton_call(kernel, args: Sequence, out: Sequence, grid: tuple[int, ...], **meta) -> tuple:
    """Runs ``kernel(*args, *out, **meta)`` over ``grid``; ``out``: shapes and dtypes of what it writes, returned.
    Those of ``input_output_aliases`` {argument: output} it has as arguments only, and writes where they lie."""
    import jax_triton

    return tuple(jax_triton.triton_call(*args, kernel=kernel, out_type=list(out), grid=grid, **meta))
