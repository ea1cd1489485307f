"""How far float32 may be from the truth: at most three times as far as transformers' own float32.

An absolute tolerance holds on the CPU that it was measured on: another one adds in another order. So the truth is
transformers in float64, the measure is transformers in float32 on this very machine, and ours is held to that. Kernels
are held in the same way to their plain definitions in JAX.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dflash_jax import kernels

# Times the reference's own distance, both as a root mean square and at the single worst value, which shows a fault in
# one place that a mean dilutes. Ours adds in other orders (pieces, chunks, kernels): as a root mean square it comes to
# 0.3 to 1.2 times. Which value is worst is luck for both sides: over six seeds of a model it comes to 0.2 to 1.5 times,
# once to 3.3, of which all but 2.2 are the roundings below.
FACTOR = 3
# Roundings that are allowed whatever the reference does, which may be exact by luck: one of the result itself is half
# an eps, and a sum of n terms is off by about sqrt(n) halves, of n = 100 or so in these models.
LEAST_ROUNDINGS = 4


@dataclass(frozen=True)
class Exact:
    """An array in float64, and what the same computation gives in float32."""

    value: np.ndarray
    single: np.ndarray

    def __getitem__(self, at) -> "Exact":
        return Exact(self.value[at], self.single[at])


def assert_near(found, exact: Exact, what: str) -> None:
    """Asserts that float32 ``found`` is as near to float64 as the reference's own float32 (module docstring)."""
    assert found.shape == exact.value.shape, f"{what}: shape {found.shape}, not {exact.value.shape}"
    ours, reference = (np.asarray(x, np.float64) - exact.value for x in (found, exact.single))
    for name, size in (("root mean square", _rms), ("worst", _worst)):
        rounding = np.finfo(np.float32).eps * size(exact.value)
        apart, allowed = size(ours), FACTOR * size(reference) + LEAST_ROUNDINGS * rounding
        # Not "apart > allowed": a NaN must fail.
        assert apart <= allowed, f"{what}: {apart:.2e} from float64 ({name}), {allowed:.2e} is allowed"


def assert_sum_near(found: float, terms: Exact, what: str) -> None:
    """`assert_near` of a sum of ``terms``. The reference's distance is added up: in its sum it may cancel by luck."""
    apart = abs(found - terms.value.sum())
    rounding = np.finfo(np.float32).eps * np.abs(terms.value).sum()
    allowed = FACTOR * np.abs(terms.single - terms.value).sum() + LEAST_ROUNDINGS * rounding
    assert apart <= allowed, f"{what}: {apart:.2e} from float64, {allowed:.2e} is allowed"


def in_both_of(definition: Callable, *args):
    """What ``definition``, a function in JAX, makes of ``args``, with an `Exact` in place of each array."""
    single = definition(*args)
    # float64 where the definition asks for float32 by name; kernels know no other.
    with jax.enable_x64(True), kernels.without(), mock.patch.object(jnp, "float32", jnp.float64):
        double = definition(*jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, args))
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(double))
    return jax.tree.map(lambda a, b: Exact(np.asarray(a), np.asarray(b)), double, single)


def assert_as_near(found, definition: Callable, *args) -> None:
    """`assert_near` of arrays ``found`` to what ``definition``, a function in JAX, makes of ``args``."""
    exact = jax.tree.leaves(in_both_of(definition, *args), is_leaf=lambda x: isinstance(x, Exact))
    for (path, got), each in zip(jax.tree.leaves_with_path(found), exact, strict=True):
        assert_near(np.asarray(got), each, jax.tree_util.keystr(path) or "the result")


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _worst(x: np.ndarray) -> float:
    return float(np.abs(x).max())


class _Double(TorchFunctionMode):
    """float64 wherever a model asks for float32 by name: norms, softmax, rotary angles and the delta rule do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def double(x):
            return torch.float64 if x is torch.float32 else x

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(double, args), **{k: double(v) for k, v in (kwargs or {}).items()})


@contextmanager
def doubled() -> Iterator[None]:
    """What models compute inside is in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)


def double_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a transformers model whose rotary frequencies, too, were computed in float64."""
    with doubled():
        copy = type(model)(model.config).double()
    copy.load_state_dict(model.state_dict())
    # The fused forms know no float64.
    copy.set_attn_implementation("eager")
    if hasattr(copy, "set_experts_implementation"):
        copy.set_experts_implementation("eager")
    return copy.eval()


def in_both(model, tokens, **options) -> tuple[Exact, list[Exact]]:
    """Logits [B, T, V] of ``tokens`` [B, T], and the outputs of the embedding and of each layer, [B, T, H]."""
    single = _forward(model, tokens, options)
    with doubled():
        double = _forward(double_of(model), tokens, options)
    assert all(x.dtype == np.float64 for x in double)
    logits, *states = (Exact(a, b) for a, b in zip(double, single, strict=True))
    return logits, states


def _forward(model, tokens, options) -> list[np.ndarray]:
    last = []
    # transformers gives the last hidden state behind the final norm.
    (norm,) = (m for name, m in model.named_modules() if name in ("model.norm", "model.language_model.norm"))
    hook = norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.no_grad():
        out = model(torch.as_tensor(np.asarray(tokens)).long(), output_hidden_states=True, use_cache=False, **options)
    hook.remove()
    return [x.numpy() for x in (out.logits, *out.hidden_states[:-1], *last)]
