"""The MTP head in PyTorch, around transformers' decoder layer: transformers itself ignores ``mtp.*``.

It computes whole sequences without caches; drafts are made one at a time over the sequence so far.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tests.float64 import Exact, double_of, doubled
from tests.parity.oracle import randomise


class Head(nn.Module):
    """The head of ``model``, of random weights; its parameters have the names of a checkpoint, without ``mtp.``."""

    def __init__(self, model, layer: type, norm: type, seed: int = 0):
        super().__init__()
        self.classes, config = (layer, norm), model.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        self.norm = norm(hidden, eps=eps)
        randomise(self, seed)

    def set_attn_implementation(self, name: str) -> None:
        """The layer reads the model's."""

    def forward(self, model, hidden, embeddings, positions):
        """z [B, T, H] for hidden states [B, T, H] and the embeddings of the tokens behind them."""
        u = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1))
        n = u.shape[1]
        mask = torch.full((n, n), torch.finfo(u.dtype).min, dtype=u.dtype).triu(1)[None, None]
        angles = model.model.rotary_emb(u, positions)
        return self.norm(self.layers[0](u, position_embeddings=angles, attention_mask=mask))


@torch.no_grad()
def draft_logits(model, head: Head, tokens, drafts, positions) -> np.ndarray:
    """Logits [K, V] of K steps behind ``tokens`` [T], whose last has no hidden state yet, given the ``drafts`` [K].

    Step j reads the draft of step j - 1 and its z, in the places of a token and a hidden state. The rotary
    ``positions`` are [3, T - 1].
    """
    ids, positions = torch.as_tensor(tokens).long()[None], torch.tensor(np.array(positions))[:, None]
    if (positions == positions[:1]).all():
        # Of text; qwen3_next knows no others.
        positions = positions[0]
    embed = model.model.embed_tokens
    hidden = model.model(ids[:, :-1], position_ids=positions, use_cache=False).last_hidden_state
    embeddings, result = embed(ids[:, 1:]), []
    for draft in torch.as_tensor(drafts).long():
        z = head(model, hidden, embeddings, positions)[:, -1:]
        result.append(model.lm_head(z)[0, 0])
        hidden, embeddings = torch.cat([hidden, z], 1), torch.cat([embeddings, embed(draft[None, None])], 1)
        positions = torch.cat([positions, torch.full_like(positions[..., -1:], int(positions[..., -1].max()) + 1)], -1)
    return torch.stack(result).numpy()


def in_both(function: Callable, model, head: Head, *args) -> Exact:
    """``function(model, head, *args)`` in float64 and in float32."""
    single = function(model, head, *args)
    with doubled():
        wide = Head(model, *head.classes).double()
        wide.load_state_dict(head.state_dict())
        return Exact(function(double_of(model), wide.eval(), *args), single)


def tensors(head: Head, per_expert: bool = False) -> dict[str, np.ndarray]:
    """The head's tensors on disk; ``per_expert``: experts are not stacked."""
    result = {f"mtp.{name}": p.detach().numpy().copy() for name, p in head.named_parameters()}
    for name in [n for n in result if ".experts." in n and per_expert]:
        stacked, prefix = result.pop(name), name.rsplit(".", 1)[0]
        for i, matrix in enumerate(stacked):
            parts = {"gate": matrix[: len(matrix) // 2], "up": matrix[len(matrix) // 2 :]}
            parts = parts if name.endswith("gate_up_proj") else {"down": matrix}
            result |= {f"{prefix}.{i}.{part}_proj.weight": x.copy() for part, x in parts.items()}
    return result
