"""A tiny random model with a vision tower, as a directory that transformers wrote, with tokenizer and template."""

import json
from pathlib import Path

import tokenizers
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from dflash_jax.frontend.llm_config import TINY
from tests.parity.oracle import randomise
from tests.parity.test_qwen3_5 import DENSE, MOE

PADS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
VOCAB = 520
VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 36,
    "num_position_embeddings": 36,
}
FAMILIES = {
    "dense": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, DENSE),
    "moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, MOE),
}
# Parts of a content in place of its text.
CONTENT = """{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"""


def write_vision_checkpoint(path: Path, family: str = "dense") -> torch.nn.Module:
    """Writes a checkpoint.

    Images have 64 to 4,096 pixels, and a token stands for 8 by 8 of them.

    Returns:
        The model of transformers.
    """
    kind, config, text = FAMILIES[family]
    ids = dict(zip(KEYS, range(512, 516), strict=True))
    model = kind(config(text_config=text | {"vocab_size": VOCAB}, vision_config=VISION, **ids))
    model = randomise(model, 11, offset=0.0).eval()
    model.save_pretrained(path)
    fast = tokenizers.Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    fast.add_special_tokens([tokenizers.AddedToken(pad, special=True, normalized=False) for pad in PADS])
    assert [fast.token_to_id(pad) for pad in PADS] == list(ids.values())
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text((TINY / "target" / "tokenizer_config.json").read_text())
    template = (TINY / "target" / "chat_template.jinja").read_text()
    assert "{{- message.content }}" in template
    (path / "chat_template.jinja").write_text(template.replace("{{- message.content }}", CONTENT))
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    image = patches | {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    video = patches | {"size": {"shortest_edge": 64, "longest_edge": 16384}, "fps": 2, "min_frames": 2}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return model
