"""A process that imports what a front needs, and says what its models read; `test_front_model.py` starts it."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import dflash_jax
from dflash_jax.errors import InputError
from dflash_jax.frontend.front_model import FrontModel, ModelFacts
from dflash_jax.frontend.prompts import Prompts
from dflash_jax.media.parts import MediaPart
from dflash_jax.sampling_params import SamplingParams

# The engine's process has these.
ENGINE = {f"dflash_jax.server.{name}" for name in ("engine_host", "management", "metrics", "tower")}
# Not torch, which transformers imports where it is installed.
HEAVY = ("jax", "jaxlib", "flax", "orbax")
TEXTS = ["def main(", "é漢😀", "<|im_start|>user\nhello", "x" * 3000]
TALKS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "short"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
]
PARAMS = {
    "stop": SamplingParams(stop=("x",), min_tokens=2, seed=1),
    "filled": SamplingParams(max_tokens=None, seed=1),
    "long": SamplingParams(max_tokens=10**6),
}


def tried(function, *args) -> Any:
    """A value or an error's message."""
    try:
        return function(*args)
    except InputError as e:
        return str(e)


def placed(model: Prompts) -> Any:
    """Where an image and a video are in a prompt, and what is read of them."""
    values = np.arange(4 * 40 * 24 * 3, dtype=np.uint8).reshape(4, 40, 24, 3)
    sources = {"image": Image.fromarray(values[0]), "video": values}
    content = [{"type": "text", "text": "a"}, *({"type": kind} for kind in sources), {"type": "text", "text": "b"}]
    ids = model.encode_chat([{"role": "user", "content": content}])
    ids, media = model.with_media(ids, [MediaPart(kind, source, kind) for kind, source in sources.items()])
    pixels = [(m.kind, m.key.hex(), m.grid, m.timestamps, int(m.pixels.sum())) for m in media.media]
    return ids, pixels, media.frames, media.positions.tolist(), media.rope_delta, vars(model.media_reader().limits)


def description(model: Prompts) -> Any:
    """What a model makes of text and media, as JSON holds it."""
    names = ("block_size", "largest_block", "max_len", "slots", "dtype", "drafting_method")
    found: dict[str, Any] = {name: getattr(model, name) for name in names}
    found |= {"directory": str(model.directory), "config": repr(model.config), "limits": vars(model.limits)}
    found |= {"defaults": vars(model.defaults), "ids": [tried(model.encode, text) for text in TEXTS]}
    found["refused"] = [tried(model.encode, [model.config.vocab_size]), tried(model.check_length, "x" * 10**6)]
    found["chats"] = [tried(model.encode_chat, talk) for talk in TALKS]
    for name, params in PARAMS.items():
        made = tried(model.new_sequence, "a b", params)
        request = None if isinstance(made, str) else made.request
        found[name] = made if request is None else [request.prompt, request.stops, repr(request.params)]
    found["media"] = tried(placed, model)
    return json.loads(json.dumps(found))


def main() -> None:
    """Reads the facts of models, and prints what is loaded, and the description of each model."""
    for path in sorted((Path(dflash_jax.__file__).parent / "server").glob("*.py")):
        if (name := f"dflash_jax.server.{path.stem}") not in ENGINE:
            import_module(name)
    models = [FrontModel(ModelFacts(**facts)) for facts in json.load(sys.stdin)]
    found = [description(model) for model in models]
    print(json.dumps([[name for name in HEAVY if name in sys.modules], found]))


if __name__ == "__main__":
    main()
