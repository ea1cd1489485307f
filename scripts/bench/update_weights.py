"""Seconds of `LLM.update_weights` beside those of a load, by the form of the new weights.

    python scripts/bench/update_weights.py [--target DIR] [--draft DIR] [--mesh tensor=8] [--devices 8] [--repeats N]

--devices makes so many devices of a CPU. Updates are measured after a first one, which compiles what joins tensors.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--mesh")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if args.devices:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    import numpy as np

    from dflash_jax import LLM
    from dflash_jax.checkpoint.files import TensorFiles
    from dflash_jax.models.packing import unpack_weights

    draft = None if args.draft == "none" else args.draft
    llm = LLM(args.target, draft=draft, mesh=args.mesh)
    files = TensorFiles(llm.directory)
    tensors = {name: np.array(files.read(name)) for name in files}
    on_device = {name: jax.numpy.asarray(array) for name, array in tensors.items()}
    module = jax.tree.map(jax.numpy.array, unpack_weights(llm.target))
    size = sum(x.nbytes for x in jax.tree.leaves(module))
    ways: dict[str, Callable[[], object]] = {
        "a load": lambda: LLM(args.target, draft=draft, mesh=args.mesh),
        "a directory": lambda: llm.update_weights(llm.directory),
        "tensors of NumPy": lambda: llm.update_weights(tensors),
        "tensors of JAX": lambda: llm.update_weights(on_device),
        "a module on the devices": lambda: llm.update_weights(module),
    }
    print(f"{size / 1e6:.1f} MB of target as arrays, mesh {llm.target.layout}, {jax.devices()[0].device_kind}")
    print("| weights | median s | least s | GB/s |\n|---|---|---|---|")
    for name, call in ways.items():
        call()
        seconds = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        middle = statistics.median(seconds)
        print(f"| {name} | {middle:.3f} | {min(seconds):.3f} | {size / middle / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
