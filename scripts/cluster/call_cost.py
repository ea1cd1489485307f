"""What it costs a leader to send a call: two CPU processes on this machine, beside JAX's broadcast of one number."""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from dflash_jax.engine.config import Speculation
from dflash_jax.engine.dispatch import Dispatch
from dflash_jax.engine.lead import CODEC, Leader
from dflash_jax.parallel import distributed
from dflash_jax.parallel.group import joined


def median_us(call: Callable[[], object], times: int) -> float:
    """Microseconds of a call."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


def measure() -> None:
    """One of the two processes."""
    distributed.start()
    group = joined(0)
    assert group is not None, "one process is no group"
    agreed = median_us(lambda: distributed.agreed(1), 200)
    with group.turn():
        if not group.leads:
            while (message := group.next()) is not None:
                CODEC.decode(message)
            return
        print(f"broadcast of a number: {agreed:.0f} us", file=sys.stderr)
        leader = Leader(group, ())
        for slots in (1, 32, 256):
            dispatch = Dispatch(tuple(range(slots)), (16,) * slots, 8, Speculation(16), slots)

            def send(dispatch: Dispatch = dispatch) -> None:
                with leader.call(1, "decode", dispatch):
                    pass

            size = len(CODEC.encode((1, (), 1, "decode", (dispatch,))))
            print(f"call of {slots} slots: {median_us(send, 3000):.0f} us, {size} bytes", file=sys.stderr)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if "JAX_PROCESS_ID" in os.environ:
        measure()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        # Gloo writes to stdout.
        subprocess.Popen(
            [sys.executable, __file__], env=environment | {"JAX_PROCESS_ID": str(i)}, stdout=subprocess.DEVNULL
        )
        for i in range(2)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
