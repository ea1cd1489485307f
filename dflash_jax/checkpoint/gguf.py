"""Converts a GGUF file to a Hugging Face directory."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_jax.checkpoint import gguf_packed
from dflash_jax.checkpoint.files import DTYPES, Streamed, new_directory, stream_tensors, write_json
from dflash_jax.checkpoint.gguf_config import TOKENS, architecture_of, read_config, token_ids
from dflash_jax.checkpoint.gguf_file import F16, F32, GgufFile
from dflash_jax.checkpoint.gguf_tensors import Output, hf_tensors, is_head_alone
from dflash_jax.checkpoint.gguf_tokenizer import save_tokenizer
from dflash_jax.checkpoint.load import open_drafter, open_target, read_draft_config, read_target_config
from dflash_jax.errors import InputError
from dflash_jax.models import families
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.families import dflash, mtp
from dflash_jax.models.families.names import Entry
from dflash_jax.models.mtp_config import MtpConfig

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def own_dtypes(file: GgufFile) -> dict[int, str]:
    """The dtype of each ggml type of a file: what is not quantised keeps its numbers, the rest is bfloat16.

    float16 is kept where no other matrix has 16 bits or less, since one parameter may be made of several tensors.
    """
    kinds = {t.kind for t in file.tensors.values() if len(t.shape) > 1} - {F32}
    return dict.fromkeys(kinds, "bfloat16") | {F32: "float32", F16: "float16" if kinds <= {F16} else "float32"}


def convert(source: str | Path, target: str | Path, dtype: str | None = None) -> dict:
    """Writes a Hugging Face directory from a GGUF file, some rows of a tensor in memory at a time.

    Args:
        source: A GGUF file, or one of several that are one model.
        target: A new or empty directory. It appears when it is complete.
        dtype: "float32", "bfloat16" or "float16"; None: as the file has them (`gguf_packed`, `own_dtypes`).

    Returns:
        The ``config.json``.

    Raises:
        InputError: The file is invalid or not supported, or ``target`` cannot be written.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise InputError(f"dtype {dtype!r}: it must be one of {', '.join(DTYPE_NAMES)}")
    file = GgufFile(source)
    with new_directory(Path(target)) as half:
        return write(file, half, dtype)


def write(file: GgufFile, directory: Path, dtype: str | None = None) -> dict:
    """As `convert`, of a file whose header was read, into a directory that exists."""
    config = read_config(file)
    dtypes = own_dtypes(file)
    kinds = {dtypes.get(t.kind) for t in file.tensors.values() if len(t.shape) > 1}
    config["dtype"] = dtype or next((name for name in ("bfloat16", "float16") if name in kinds), "float32")
    is_drafter, is_alone = architecture_of(file).is_drafter, is_head_alone(file, config)
    write_json(directory / "config.json", config)
    # Checks that the model is supported before its tensors are looked at.
    _of_file(file, directory, read_draft_config if is_drafter else read_target_config)
    outputs = hf_tensors(file, config)
    if not is_drafter and not is_alone:
        save_tokenizer(file.metadata, directory, config["max_position_embeddings"], str(file.path))
        write_json(directory / "generation_config.json", token_ids(file))
    bits = gguf_packed.packed_bits(_entries(config, outputs, directory), outputs) if dtype is None else {}
    if bits:
        config["quantization_config"] = gguf_packed.quantization_config(bits, outputs)
        write_json(directory / "config.json", config)
    tensors = {}
    for name, output in outputs.items():
        is_packed = name in bits
        parts = gguf_packed.packed(name, output, bits[name]) if is_packed else _dense(name, output, dtype or dtypes)
        tensors |= {part: replace(each, pieces=_released(file, each.pieces)) for part, each in parts.items()}

    def check() -> None:
        if not is_drafter and not is_alone:
            _of_file(file, directory, open_target)
        if is_drafter or config.get("mtp_num_hidden_layers"):
            _of_file(file, directory, open_drafter)

    stream_tensors(directory / "model.safetensors", tensors, file.path, check)
    # Its numbers tell whether it is needed.
    if TOKENS in outputs:
        check()
    return config


def _of_file(file: GgufFile, directory: Path, read: Callable[[Path], object]) -> None:
    """Calls a reader of a directory; its errors name the file that the directory is made of."""
    try:
        read(directory)
    except InputError as error:
        message = error.args[0].replace(f"{directory / 'config.json'}", f"{file.path}")
        message = message.replace("does not fit its config.json,", "does not fit its metadata, by Hugging Face's names")
        raise InputError(message.replace(f"{directory}", f"{file.path}"), *error.args[1:]) from None


def _entries(config: dict, names: Collection[str], directory: Path) -> list[Entry]:
    """The parameters of a drafter, or of a target and its MTP head."""
    if "dflash_config" in config:
        drafter = read_draft_config(directory)
        assert isinstance(drafter, DraftConfig)
        return dflash.weight_names(drafter, names)
    target = read_target_config(directory)
    head = mtp.weight_names(MtpConfig(target), names) if config.get("mtp_num_hidden_layers") else []
    return [*families.target_family(config).weight_names(target, names), *head]


def _dense(name: str, output: Output, dtype: str | dict[int, str]) -> dict[str, Streamed]:
    """A tensor to write: in ``dtype``, or in the dtype that this has for its ggml type; int64 for whole numbers."""
    if output.is_integer:
        return {name: Streamed(output.shape, np.dtype(np.int64), output.chunks)}
    dtypes = {dtype} if isinstance(dtype, str) else {dtype.get(s.kind, "bfloat16") for s in output.sources}
    kind = DTYPE_NAMES[dtypes.pop() if len(dtypes) == 1 else "float32"]
    return {name: Streamed(output.shape, DTYPES[kind], output.chunks)}


def _released(file: GgufFile, pieces: Callable[[], Iterator[np.ndarray]]) -> Callable[[], Iterator[np.ndarray]]:
    """``pieces``, after which the file's pages are dropped; errors name the file."""

    def each() -> Iterator[np.ndarray]:
        try:
            yield from pieces()
        except InputError as error:
            raise InputError(f"{file.path}: {error.args[0]}") from None
        file.release()

    return each
