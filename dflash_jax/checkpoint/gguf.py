"""Converts a GGUF file to a Hugging Face directory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dflash_jax.checkpoint.files import DTYPES, Streamed, new_directory, stream_tensors, write_json
from dflash_jax.checkpoint.gguf_config import architecture_of, read_config, token_ids
from dflash_jax.checkpoint.gguf_file import F16, F32, GgufFile
from dflash_jax.checkpoint.gguf_tensors import Output, hf_tensors, is_head_alone
from dflash_jax.checkpoint.gguf_tokenizer import save_tokenizer
from dflash_jax.checkpoint.load import open_drafter, open_target, read_draft_config, read_target_config
from dflash_jax.errors import InputError

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def own_dtypes(file: GgufFile) -> dict[int, str]:
    """Ggml type → dtype of the tensors of a file: what is not quantised keeps its numbers, the rest is bfloat16.

    float16 is kept where no other matrix has 16 bits or less, since one parameter may be made of several tensors.
    """
    kinds = {t.kind for t in file.tensors.values() if len(t.shape) > 1} - {F32}
    return dict.fromkeys(kinds, "bfloat16") | {F32: "float32", F16: "float16" if kinds <= {F16} else "float32"}


def convert(source: str | Path, target: str | Path, dtype: str | None = None) -> dict:
    """Writes a Hugging Face directory from a GGUF file, some rows of a tensor in memory at a time.

    Args:
        source: A GGUF file, or one of several that are one model.
        target: A new or empty directory. It appears when it is complete.
        dtype: "float32", "bfloat16" or "float16"; None: `own_dtypes`.

    Returns:
        The ``config.json``.

    Raises:
        InputError: The file is invalid or not supported, or ``target`` cannot be written.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise InputError(f"dtype {dtype!r}: it must be one of {', '.join(DTYPE_NAMES)}")
    file = GgufFile(source)
    config = read_config(file)
    dtypes = own_dtypes(file)
    kinds = {dtypes.get(t.kind) for t in file.tensors.values() if len(t.shape) > 1}
    config["dtype"] = dtype or next((name for name in ("bfloat16", "float16") if name in kinds), "float32")
    is_drafter, is_alone = architecture_of(file).is_drafter, is_head_alone(file, config)
    with new_directory(Path(target)) as half:
        write_json(half / "config.json", config)
        # Checks that the model is supported before its tensors are looked at.
        (read_draft_config if is_drafter else read_target_config)(half)
        outputs = hf_tensors(file, config)
        if not is_drafter and not is_alone:
            save_tokenizer(file.metadata, half, config["max_position_embeddings"], str(source))
            write_json(half / "generation_config.json", token_ids(file))
        tensors = {name: _streamed(file, output, dtype or dtypes) for name, output in outputs.items()}

        def check() -> None:
            if not is_drafter and not is_alone:
                open_target(half)
            if is_drafter or config.get("mtp_num_hidden_layers"):
                open_drafter(half)

        stream_tensors(half / "model.safetensors", tensors, check)
    return config


def _streamed(file: GgufFile, output: Output, dtype: str | dict[int, str]) -> Streamed:
    """A tensor in one dtype, or in those of its ggml types; or whole numbers."""
    if output.is_integer:
        return Streamed(output.shape, np.dtype(np.int64), _released(file, output.chunks))
    names = {dtype} if isinstance(dtype, str) else {dtype.get(kind, "bfloat16") for _, kind in output.sources}
    name = names.pop() if len(names) == 1 else "float32"
    return Streamed(output.shape, DTYPES[DTYPE_NAMES[name]], _released(file, output.chunks))


def _released(file: GgufFile, pieces: Callable[[], Iterator[np.ndarray]]) -> Callable[[], Iterator[np.ndarray]]:
    """``pieces``, after which the file's pages are dropped; errors name the file."""

    def each() -> Iterator[np.ndarray]:
        try:
            yield from pieces()
        except InputError as error:
            raise InputError(f"{file.path}: {error.args[0]}") from None
        file.release()

    return each
