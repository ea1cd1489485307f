"""transformers in float64 and in float32: how near to the first ours must be, the second says (`float64_reference`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tools.float64_reference import Exact, assert_as_near, assert_near, assert_sum_near, in_both_of, shaken

__all__ = [
    "Exact", "assert_as_near", "assert_near", "assert_sum_near", "double_of", "doubled", "in_both", "in_both_of",
    "shaken",
]  # fmt: skip


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
