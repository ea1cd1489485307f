"""One of several processes that load checkpoints on one mesh; `test_hosts.py` starts them. Says what it read."""

import json
import sys

import jax

from dflash_jax.checkpoint.files import Tensors
from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import Layout


def main() -> None:
    """Arguments: a mesh, and directories; a drafter's ends with "draft"."""
    distributed.start()
    read, section = [0], Tensors.section

    def counted(self, *args):
        array = section(self, *args)
        read[0] += array.nbytes
        return array

    Tensors.section, found = counted, {}
    for directory in sys.argv[2:]:
        read[0] = 0
        load = load_drafter if directory.endswith("draft") else load_target
        leaves = jax.tree.leaves(load(directory, layout=Layout.parse(sys.argv[1])))
        # Devices of one host may have the same part.
        parts = {(i, str(s.index)): s.data.nbytes for i, x in enumerate(leaves) for s in x.addressable_shards}
        found[directory] = read[0], sum(parts.values()), sum(x.nbytes for x in leaves)
    # Every process speaks, and Gloo writes lines, too.
    print(f"\n{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
