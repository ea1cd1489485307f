"""The properties of an NVIDIA card that the tiles of kernels depend on."""

from dataclasses import dataclass
from typing import Any

KIB = 1024
# Values of --kernels.
CHOICES = ("auto", "all", "xla")
# Bytes of shared memory of a program, by compute capability (CUDA C++ Programming Guide, technical specifications).
# Used where JAX does not report it, and for cards that are not in this machine.
SHARED_MEMORY = {
    80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 103: 227 * KIB,
    120: 99 * KIB, 121: 99 * KIB,
}  # fmt: skip
# Multiprocessors, of an A100, A40, Orin, L40S, H200, B200, B300, RTX 5090 and GB10. Used as above; an unknown
# capability has those of the H200, on which the numbers of programs were measured.
MULTIPROCESSORS = {80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170, 121: 48}
# The oldest PTX version of each compute capability, newest first (PTX ISA, release notes; 89: for float8).
LEAST_PTX = ((121, 88), (120, 87), (103, 88), (100, 86), (90, 80), (89, 81), (80, 70))
# The oldest capability with products of bfloat16, that which converts float8, and that with products of FP4.
OLDEST, OLDEST_FP8, OLDEST_FP4 = 80, 89, 100


@dataclass(frozen=True)
class Card:
    """An NVIDIA card, or one that a program is compiled for.

    Attributes:
        capability: Its compute capability, 10 times major plus minor: 90 is Hopper, 100 data-centre Blackwell.
        shared_memory: Bytes of shared memory that one program of a kernel may have.
        multiprocessors: Its number of multiprocessors, each of which runs one program or several at once.
    """

    capability: int
    shared_memory: int
    multiprocessors: int

    @classmethod
    def of_capability(cls, capability: int) -> "Card":
        """The card of a compute capability; an unknown one gets the least shared memory of all known ones."""
        shared_memory = SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))
        return cls(capability, shared_memory, MULTIPROCESSORS.get(capability, MULTIPROCESSORS[90]))

    @classmethod
    def of_device(cls, device: Any) -> "Card":
        """The card of a CUDA `jax.Device`, or of a device of a compile-only topology."""
        card = cls.of_capability(round(10 * float(device.compute_capability)))
        shared_memory = getattr(device, "shared_memory_per_block_optin", None) or card.shared_memory
        return cls(card.capability, shared_memory, getattr(device, "core_count", None) or card.multiprocessors)

    @property
    def reads_shared(self) -> bool:
        """Whether products of 64 rows and more read operands in shared memory: on Hopper and data-centre Blackwell."""
        return 90 <= self.capability < 120

    def scaled(self, programs: int) -> int:
        """A number that was measured on an H200, in proportion to the card's multiprocessors."""
        return round(programs * self.multiprocessors / MULTIPROCESSORS[90])

    @property
    def least_ptx(self) -> int:
        """The oldest PTX version that has the card's instructions, 10 times major plus minor."""
        return next((version for since, version in LEAST_PTX if self.capability >= since), 70)


HOPPER = Card.of_capability(90)
