"""Random weights in few bits as checkpoints have them, and what they stand for by the formulas of the formats alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint.parameters import FEW_BITS
from dflash_jax.ops.weights import CODES, QuantizedWeight, quantize
from dflash_jax.parallel.sharding import parameter_paths

M = TypeVar("M", bound=nnx.Module)
FLOAT8 = ml_dtypes.float8_e4m3fn
BLOCK = 32
# As compressed-tensors and ModelOpt name them; "mixed" is NVIDIA's MIXED_PRECISION.
FP8 = ("fp8 tensor", "fp8 channel", "fp8 block", "fp8 modelopt")
# As `QuantizedWeight` has them.
NUMBERS = (*CODES, "int8", "fp8")
# Of integers, those of COMPRESSED that are not packed are UNPACKED.
UNPACKED = ("int8 channel", "int8 naive", "int8 tensor")
# Inputs of those in ACT_ORDER are in another order than that of their groups.
ACT_ORDER = ("int8 act-order", "gptq act-order", "gptq asymmetric act-order")
COMPRESSED = ("int4 group", "int4 asymmetric", "int4 channel", "int8 asymmetric", ACT_ORDER[0], *UNPACKED)
PACKED = ("gptq", "gptq asymmetric", "gptq_v2 asymmetric", "gptq eight", "awq", "awq symmetric", *ACT_ORDER[1:])
MICROSCALING = ("mxfp4", "mxfp4 modelopt", "mxfp8")
# Those whose heads are in few bits, too.
WITH_HEAD = ("fp8 channel", "nvfp4 compressed", "mixed", "int4 asymmetric", "gptq eight")
FORMS = (*FP8, "nvfp4 modelopt", "nvfp4 compressed", "mixed", *COMPRESSED, *PACKED, *MICROSCALING)
# Inputs that share a scale, of integers and of OCP Microscaling.
GROUP = 32


def of_e2m1(codes: np.ndarray) -> np.ndarray:
    """float32 values of four-bit codes: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = np.where(codes & 8, -1.0, 1.0), (codes >> 1) & 3, (codes & 1) / 2
    return (sign * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))).astype(np.float32)


def of_e4m3(array: np.ndarray) -> np.ndarray:
    """float32 values of float8 numbers: a sign, four bits of exponent, three of mantissa."""
    bits = array.view(np.uint8).astype(np.int32)
    sign, exponent, mantissa = np.where(bits & 128, -1.0, 1.0), (bits >> 3) & 15, (bits & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return (sign * size).astype(np.float32)


def unpacked(packed: np.ndarray) -> np.ndarray:
    """float32 [..., I] of bytes [..., I/2]: the low half is the even input."""
    values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.float32)
    values[..., ::2], values[..., 1::2] = of_e2m1(packed & 15), of_e2m1(packed >> 4)
    return values


def fp8(name: str, weight: np.ndarray, rng, kind: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a weight [..., O, I] in FP8 with scales of a "tensor", "channel", "block" or "modelopt"."""
    *lead, rows, columns = weight.shape
    values = (weight * 50).astype(FLOAT8)
    grid = {"channel": (rows, 1), "block": (-(-rows // BLOCK), -(-columns // BLOCK))}.get(kind, (1, 1))
    dtype = np.float32 if kind == "modelopt" else ml_dtypes.bfloat16
    scale = rng.uniform(0.01, 0.03, (*lead, *grid)).astype(dtype)
    sizes = (-(-rows // grid[0]), -(-columns // grid[1])) if kind != "block" else (BLOCK, BLOCK)
    spread = scale.astype(np.float32).repeat(sizes[0], -2)[..., :rows, :].repeat(sizes[1], -1)[..., :columns]
    on_disk = {"modelopt": tuple(lead), "tensor": (*lead, 1)}.get(kind, scale.shape)
    return {name: values, f"{name}_scale": scale.reshape(on_disk)}, of_e4m3(values) * spread


def in_fp8(directory: Path, path: Path, is_chosen: Callable[[str], bool]) -> Path:
    """A copy of a checkpoint with the matrices that ``is_chosen`` says in FP8, one scale an output."""
    directory = shutil.copytree(directory, path)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if is_chosen(name)]:
        weight = tensors[name].astype(np.float32)
        scale = (np.abs(weight).max(-1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
        tensors |= {name: (weight / scale.astype(np.float32)).astype(FLOAT8), f"{name}_scale": scale}
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text()) | {"quantization_config": config("fp8 channel")}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def nvfp4(name: str, weight: np.ndarray, rng, kind: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of random codes in the shape of a weight [..., O, I], "modelopt" or "compressed"."""
    *lead, rows, columns = weight.shape
    packed = rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8)
    scale = rng.uniform(0.25, 4, (*lead, rows, columns // 16)).astype(FLOAT8)
    whole = rng.uniform(0.005, 0.02, tuple(lead)).astype(np.float32)
    each = of_e4m3(scale)
    if kind == "modelopt":
        tensors = {name: packed, f"{name}_scale": scale, f"{name}_scale_2": np.asarray(whole)}
        each = each * np.asarray(whole)[..., None, None]
    else:
        whole = (np.float32(1) / np.asarray(whole)).reshape(*lead, 1)
        tensors = {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_global_scale": whole}
        each = each / whole[..., None]
    return tensors, unpacked(packed) * each.repeat(16, -1)


def in_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., words] of codes [..., n]: words fill from the low bits."""
    each = 32 // bits
    codes = np.pad(codes.astype(np.uint32), [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    places = codes.reshape(*codes.shape[:-1], -1, each) << (np.arange(each, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(places, -1).view(np.int32)


def integers(form: str, name: str, weight: np.ndarray, rng) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of random codes in the shape of a weight [..., O, I]: compressed-tensors', GPTQ's or AWQ's."""
    *lead, rows, columns = weight.shape
    bits = 8 if form.startswith("int8") or form == "gptq eight" else 4
    middle, is_packed = 2 ** (bits - 1), form in PACKED
    is_of_rows = form.endswith(("channel", "naive"))
    grid = (1, 1) if form == "int8 tensor" else (rows, 1 if is_of_rows else columns // GROUP)
    codes = rng.integers(0, 2**bits, (*lead, rows, columns), np.uint8)
    zero = np.full((*lead, *grid), middle)
    if "asymmetric" in form or form in ("awq", "int8 naive"):
        zero = rng.integers(0, 2**bits, zero.shape)
    # AutoRound's scales have signs.
    signs = rng.choice([-1, 1], zero.shape) if form == "int4 group" else 1
    scale = (signs * rng.uniform(0.005, 0.02, zero.shape)).astype(np.float16 if is_packed else ml_dtypes.bfloat16)
    sizes = rows // grid[0], columns // grid[1]
    each = [x.repeat(sizes[0], -2).repeat(sizes[1], -1) for x in (zero, scale.astype(np.float32))]
    order = rng.permutation(columns) if form in ACT_ORDER else np.arange(columns)
    each, group_of = [x[..., order] if x.shape[-1] == columns else x for x in each], order // GROUP
    value = (codes.astype(np.int64) - each[0]).astype(np.float32) * each[1]
    at = name.removesuffix(".weight")
    if is_packed:
        codes, zero, scale = codes.swapaxes(-1, -2), zero.swapaxes(-1, -2), scale.swapaxes(-1, -2)
        if form.startswith("awq"):
            # Nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7.
            codes, zero = (
                x.reshape(*x.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape) for x in (codes, zero)
            )
            words = in_words(codes, bits)
        else:
            words = in_words(codes.swapaxes(-1, -2), bits).swapaxes(-1, -2)
            zero = zero if form.startswith("gptq_v2") else (zero - 1) % 2**bits
        tensors = {f"{at}.qweight": words, f"{at}.qzeros": in_words(zero, bits), f"{at}.scales": scale}
        if form != "awq":
            tensors[f"{at}.g_idx"] = group_of.astype(np.int32)
    elif form in UNPACKED:
        tensors = {name: (codes.astype(np.int32) - middle).astype(np.int8), f"{name}_scale": scale}
        if form == "int8 naive":
            tensors[f"{name}_zero_point"] = (zero - middle).astype(np.int8)
        if form == "int8 tensor":
            tensors[f"{name}_scale"] = scale.reshape(*lead, 1)
    else:
        tensors = {f"{name}_packed": in_words(codes, bits), f"{name}_scale": scale}
        tensors[f"{name}_shape"] = np.asarray(weight.shape, np.int64)
        if form in ACT_ORDER:
            tensors[f"{name}_g_idx"] = group_of.astype(np.int32)
        elif form.endswith("asymmetric"):
            tensors[f"{name}_zero_point"] = in_words(zero.swapaxes(-1, -2), bits).swapaxes(-1, -2)
        elif not lead:
            tensors[f"{name}_g_idx"] = np.full(columns, -1, np.int32)
    return {n: np.ascontiguousarray(x) for n, x in tensors.items()}, value


def microscaling(form: str, name: str, weight: np.ndarray, rng) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of random numbers in the shape of a weight [..., O, I], with scales that are powers of two."""
    *lead, rows, columns = weight.shape
    exponent = rng.integers(110, 130, (*lead, rows, columns // GROUP), np.uint8)
    scale = (2.0 ** (exponent.astype(np.float64) - 127)).repeat(GROUP, -1).astype(np.float32)
    if form == "mxfp8":
        values = (weight * 50).astype(FLOAT8)
        return {name: values, f"{name}_scale": exponent}, of_e4m3(values) * scale
    packed = rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8)
    at = name if form == "mxfp4 modelopt" else f"{name}_packed"
    return {at: packed, f"{name}_scale": exponent}, unpacked(packed) * scale


def stored(form: str, name: str, weight: np.ndarray, rng) -> tuple[dict[str, np.ndarray], np.ndarray] | None:
    """The tensors of a weight in a checkpoint of ``form``, and what they stand for; None: it stays as it is."""
    kind = form.split()[-1]
    if form == "mixed":
        if name.startswith("mtp."):
            return None
        is_four = ".mlp." in name or name.startswith("lm_head")
        form, kind = ("nvfp4", "modelopt") if is_four else ("fp8", "modelopt")
    if form.startswith("fp8"):
        return fp8(name, weight, rng, kind)
    if form in PACKED and not (name.endswith(".weight") and weight.shape[-2] % 8 == 0):
        return None
    if not form.startswith("nvfp4"):
        make = microscaling if form in MICROSCALING else integers
        return None if weight.shape[-1] % GROUP else make(form, name, weight, rng)
    return None if weight.shape[-1] % 16 else nvfp4(name, weight, rng, kind)


def unused(names) -> dict[str, np.ndarray]:
    """Scales of activations, keys and values beside the tensors ``names`` of a mixed checkpoint."""
    inputs = [n for n in names if n.endswith(".weight_scale")]
    caches = [n for n in names if n.endswith(("k_proj.weight", "v_proj.weight"))]
    one = np.ones((), np.float32)
    return {f"{n.removesuffix('weight_scale')}input_scale": one for n in inputs} | {
        f"{n.removesuffix('weight')}{n.split('.')[-2][0]}_scale": one for n in caches
    }


def config(form: str, layers: int = 2) -> dict:
    """``quantization_config``."""
    if form in ("fp8 modelopt", "nvfp4 modelopt"):
        algorithm = form.split()[0].upper()
        return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head", "*gate"]}
    if form == "mixed":
        four, eight = {"quant_algo": "W4A16_NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
        named: dict[str, dict] = {"lm_head": four}
        for at in (f"{prefix}layers.{i}." for prefix in ("model.language_model.", "") for i in range(layers)):
            named |= {f"{at}mlp": four, f"{at}self_attn": eight, f"{at}linear_attn": eight}
        extra = {"quantized_layers": named, "ignore": ["mtp*", "mtp.layers.0*"]}
        # Contradicts what the layers say, as NVIDIA's do.
        groups = {"group_0": {"input_activations": {"num_bits": 4}, "weights": {"num_bits": 4}, "targets": ["Linear"]}}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": groups, **extra}
    if form in PACKED:
        is_symmetric = "asymmetric" not in form and form != "awq"
        packed: dict = {"bits": 8 if form == "gptq eight" else 4, "group_size": GROUP}
        if form.startswith("awq"):
            return packed | {"quant_method": "awq", "version": "gemm", "zero_point": not is_symmetric}
        version = form.split()[0]
        gptq = {"quant_method": "gptq", "checkpoint_format": version, "sym": is_symmetric}
        gptq |= {"desc_act": form in ACT_ORDER, "lm_head": form in WITH_HEAD}
        dense = ("-:.*shared_expert_gate.*", *([] if form in WITH_HEAD else ["-:^lm_head$"]))
        return packed | gptq | {"dynamic": {name: {} for name in dense}}
    if form == "mxfp4 modelopt":
        return {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32}
    weights: dict = {"num_bits": 8, "type": "float", "strategy": form.split()[-1], "symmetric": True}
    if form in MICROSCALING:
        weights |= {"num_bits": int(form[-1]), "strategy": "group", "group_size": GROUP, "scale_dtype": "torch.uint8"}
    if form in COMPRESSED:
        kind = {"tensor": "tensor", "channel": "channel", "naive": "channel"}.get(form.split()[-1], "group")
        is_symmetric = not form.endswith(("asymmetric", "naive"))
        weights = {"num_bits": int(form[3]), "type": "int", "strategy": kind, "symmetric": is_symmetric}
        order = "group" if form in ACT_ORDER else "weight"
        weights |= {"group_size": GROUP if kind == "group" else None, "actorder": order, "observer": "mse"}
    if form == "fp8 block":
        weights["block_structure"] = [BLOCK, BLOCK]
    if form == "nvfp4 compressed":
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    ignore = ["re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:visual.*"]
    ignore += [] if form in WITH_HEAD else ["lm_head"]
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}


def weight(
    rng, rows: tuple[int, ...], size: int, run: int, form: str, has_zero: bool = False, has_factor: bool = False,
    scale=None,
) -> QuantizedWeight:  # fmt: skip
    """A random weight [*rows, size] of `NUMBERS`; its scales have a dtype, by default one that follows from the rest.

    A number times its scale has no more bits than a float32.
    """
    runs = (*rows, size // run)
    if form in CODES:
        values = rng.integers(0, 256, (*rows, size // 2), np.uint8)
    else:
        values = rng.integers(-127, 128, (*rows, size)).astype(np.int8 if form == "int8" else FLOAT8)
    scales = rng.uniform(0.5, 2, runs).astype(FLOAT8 if has_factor else ml_dtypes.bfloat16)
    zero = rng.integers(-8, 8, runs).astype(np.int8) if has_zero else None
    factor = rng.uniform(0.5, 2, (*rows, 1)).astype(ml_dtypes.bfloat16).astype(np.float32) if has_factor else None
    scales = scales.astype(scale or (FLOAT8 if has_factor else np.float32))
    return jax.tree.map(jnp.asarray, QuantizedWeight(values, scales, zero, factor, form if form in CODES else None))


def quantized(module: M, form: str) -> M:
    """``module`` with its large matrices and its head in few bits."""
    leaves, structure = jax.tree.flatten(module)
    named = zip(parameter_paths(module), leaves, strict=True)
    return jax.tree.unflatten(
        structure, [quantize(x, form) if path.rsplit(".", 1)[-1] in FEW_BITS else x for path, x in named]
    )


def of(weight: QuantizedWeight) -> np.ndarray:
    """The float64 array that a weight stands for."""
    values, scale = np.asarray(weight.values), np.asarray(weight.scale)
    if weight.code is not None:
        codes = np.stack([values & 15, values >> 4], -1).reshape(weight.shape)
        numbers = codes.astype(np.float64) - 8 if weight.code == "int4" else of_e2m1(codes).astype(np.float64)
    else:
        numbers = (of_e4m3(values) if values.dtype == FLOAT8 else values).astype(np.float64)
    whole = scale.astype(np.float64)
    if weight.factor is not None:
        factor = np.asarray(weight.factor)
        whole *= factor.repeat(whole.shape[-1] // factor.shape[-1], -1)
    zero = 0 if weight.zero is None else np.asarray(weight.zero)[..., None]
    return ((numbers.reshape(*scale.shape, -1) - zero) * whole[..., None]).reshape(weight.shape)
