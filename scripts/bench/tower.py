"""The vision tower against transformers on the same random weights: float32, this CPU, one process, by turns.

    python scripts/bench/tower.py [--config FILE] [--sizes 224x224 480x640 ...] [--turns N] [--threads N] [--json FILE]

Each size, height by width in pixels, is an image of noise. A turn encodes it once by each contender, in an order that
changes; medians are reported, and how far the outputs are apart. --frames N: a video of N frames of each size instead.
The shapes are those of a config.json with a vision_config (default: Qwen3.6-35B-A3B's).
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SIZES = ("224x224", "480x640", "768x768", "1024x1024")


def contenders(raw: dict, threads: int) -> dict[str, Callable]:
    """Contender → a function of a `Medium` that returns its rows. Both have the same weights."""
    import torch
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    from dflash_jax.engine.vision_encoder import VisionEncoder
    from dflash_jax.frontend.loading import packed
    from dflash_jax.models.families.reading import Raw
    from dflash_jax.models.families.vision import read_vision, vision_entries
    from dflash_jax.models.vision import abstract_tower
    from dflash_jax.ops.backend import Backend

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    given = {key: value for key, value in raw["vision_config"].items() if key != "model_type"}
    model = Qwen3_5MoeVisionModel._from_config(Qwen3_5MoeVisionConfig(**given)).eval().float()
    config = read_vision(Raw(raw))
    assert config is not None, "no vision_config"
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    by_path = {e.path: e.read([tensors[t.name] for t in e.tensors]) for e in vision_entries(config, prefix="")}
    tower = filled(abstract_tower(config, backend=Backend.detect()), by_path)
    encoder = VisionEncoder(packed(tower, "float32"))

    def by_transformers(medium) -> np.ndarray:
        with torch.inference_mode():
            out = model(torch.from_numpy(medium.patches()), grid_thw=torch.tensor([medium.grid]))
        return out.pooler_output.numpy()

    return {"transformers": by_transformers, "dflash_jax": lambda medium: encoder.encode([medium])[0]}


def filled(tower, arrays: dict[str, np.ndarray]):
    """The abstract tower with these parameters, by their paths."""
    import jax

    from dflash_jax.parallel.sharding import parameter_paths

    leaves = [jax.numpy.asarray(arrays[path]) for path in parameter_paths(tower)]
    return jax.tree.unflatten(jax.tree.structure(tower), leaves)


def medium_of(size: str, frames: int):
    """An image of noise, or a video of ``frames`` frames."""
    from dflash_jax.media.processor import ImageSettings, read_image
    from dflash_jax.media.video import VideoSettings, read_video

    height, width = map(int, size.split("x"))
    pixels = np.random.default_rng(0).integers(0, 256, (max(frames, 1), height, width, 3), np.uint8)
    if frames:
        return read_video(pixels, VideoSettings(), num_frames=frames)
    from PIL import Image

    return read_image(Image.fromarray(pixels[0]), ImageSettings())


def measure(run: dict[str, Callable], medium, turns: int) -> dict:
    """Median seconds of each contender, and the distance of their outputs as a share of their size."""
    # The first call compiles.
    rows = {name: encode(medium) for name, encode in run.items()}
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(turns):
        for name in sorted(run, reverse=bool(turn % 2)):
            began = time.perf_counter()
            run[name](medium)
            seconds[name].append(time.perf_counter() - began)
    ours, theirs = (np.asarray(rows[name], np.float64) for name in ("dflash_jax", "transformers"))
    median = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "grid": list(medium.grid),
        "tokens": medium.tokens,
        "seconds": median,
        "fastest_seconds": {name: min(each) for name, each in seconds.items()},
        "speed_of_transformers": median["transformers"] / median["dflash_jax"],
        "distance": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/hf/Qwen3.6-35B-A3B.json", metavar="FILE")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="HxW", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--frames", type=int, default=0, metavar="N", help="default: images")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="default: as many as there are cores")
    parser.add_argument("--depth", type=int, metavar="N", help="only the first N blocks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are added")
    args = parser.parse_args()
    if args.threads:
        # XLA has a thread for each core that it may use.
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.threads]))
    threads = len(os.sched_getaffinity(0))
    raw = json.loads(args.config.read_text())
    if args.depth:
        raw["vision_config"]["depth"] = args.depth
    run = contenders(raw, threads)
    for size in args.sizes:
        figures = {"size": size, "frames": args.frames, "threads": threads} | measure(
            run, medium_of(size, args.frames), args.turns
        )
        print(json.dumps(figures), flush=True)
        if args.json:
            known = json.loads(args.json.read_text()) if args.json.exists() else []
            args.json.write_text(json.dumps([*known, figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
