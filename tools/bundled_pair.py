"""Copies of the bundled pair with other configs."""

import json
import shutil
from pathlib import Path

import numpy as np

from dflash_jax.checkpoint.files import TensorFiles, write_json, write_tensors
from dflash_jax.frontend.llm_config import TINY


def with_positions(directory: Path, positions: int, pair: Path = TINY) -> tuple[Path, Path]:
    """Copies a pair, and raises its positions.

    The bundled pair was trained on rows of 512 and 256 tokens: at later positions its speed is that of any pair of its
    shapes, and its text is not worth reading.

    Args:
        directory: Gets the directories ``target`` and ``draft``.
        positions: Positions of both models at least.
        pair: A directory with ``target`` and ``draft``.

    Returns:
        The directories of target and drafter.
    """
    copies = []
    for name in ("target", "draft"):
        copy = shutil.copytree(pair / name, directory / name, dirs_exist_ok=True)
        path = copy / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
        write_json(path, config)
        copies.append(copy)
    return copies[0], copies[1]


def without_selector(directory: Path) -> Path:
    """Copies the bundled drafter without its selector: a DFlash drafter, whose places choose alone.

    Args:
        directory: Gets the drafter; it does not exist.

    Returns:
        ``directory``.
    """
    shutil.copytree(TINY / "draft", directory)
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kept = {key: raw["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    write_json(directory / "config.json", raw | {"architectures": ["DFlashDraftModel"], "dflash_config": kept})
    tensors = TensorFiles(TINY / "draft")
    write_tensors(directory, {n: np.array(tensors.read(n)) for n in tensors if not n.startswith("candidate_selector.")})
    return directory
