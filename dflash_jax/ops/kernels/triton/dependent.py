"""Parts of kernels that may be dependent launches (`call`): they begin while the kernel before them ends."""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Lets the next kernel begin, and waits for all that the kernel before has written.

    Every program calls it, before it reads or writes anything: then a kernel that has ended has waited for all kernels
    before it. Only `prefetch` may come before.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointer, size, DEPENDENT: tl.constexpr):
    """Asks for ``size`` bytes of a weight, rounded down to a multiple of 16, to be brought into the L2 cache."""
    if DEPENDENT:
        # By one thread of the program. The result is there since an operation of Triton has one.
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [pointer.to(tl.int64), (size // 16 * 16).to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
