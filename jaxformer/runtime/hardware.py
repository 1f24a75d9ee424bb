"""A table of chips, for plans and for the MFU of a run, with the vendors' numbers.

Dense bfloat16 peaks, memory and its bandwidth: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e), NVIDIA's data sheets of
the H100 (SXM5, PCIe, NVL), H200 SXM and A100 SXM4 80GB. Links of a TPU, one direction of one link: Austin et al. 2025,
"How to Scale Your Model", chapter 2. NVLink: data sheets, one direction. Between nodes: one ConnectX-7 (400 Gb/s) per
H100 or H200, one ConnectX-6 (200 Gb/s) per A100, as in the vendors' own eight-GPU machines.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: as in a topology, "v5e".
      platform: "tpu", "cuda" or "cpu".
      memory: bytes that a program may use; None: unknown.
      flops: dense bfloat16 peak, FLOP/s; None: unknown.
      bandwidth: of its memory, bytes/s.
      link: bytes/s that a device sends along one axis of a TPU's torus, both directions together; or over NVLink to the
        GPUs of its node.
      torus: axes of a TPU's torus; 0: none.
      network: bytes/s of one device to other nodes; None: there are none.
    """

    name: str
    platform: str
    memory: float | None = None
    flops: float | None = None
    bandwidth: float | None = None
    link: float | None = None
    torus: int = 0
    network: float | None = None


# TPU compilers reserve some memory: a program gets 15.75 of v5e's 16 GiB. GPUs: 95 % of what the driver leaves, as
# allocated by a run.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 30.75 * GIB, 275e12, 1.23e12, 2 * 4.5e10, 3),
        Chip("v5e", "tpu", 15.75 * GIB, 197e12, 8.2e11, 2 * 4.5e10, 2),
        Chip("v5p", "tpu", 95.74 * GIB, 459e12, 2.77e12, 2 * 9e10, 3),
        Chip("v6e", "tpu", 31.25 * GIB, 918e12, 1.64e12, 2 * 9e10, 2),
        Chip("a100", "cuda", 0.95 * 79.25 * GIB, 312e12, 2.039e12, 3e11, 0, 2.5e10),
        Chip("h100", "cuda", 0.95 * 79.11 * GIB, 989e12, 3.35e12, 4.5e11, 0, 5e10),
        Chip("h200", "cuda", 0.95 * 139.8 * GIB, 989e12, 4.8e12, 4.5e11, 0, 5e10),
        Chip("cpu", "cpu"),
    )
}


# How the names that JAX gives to devices begin, the longer of two before the shorter.
DEVICE_KINDS = (
    ("TPU v6 lite", CHIPS["v6e"]),
    ("TPU v6e", CHIPS["v6e"]),
    ("TPU v5 lite", CHIPS["v5e"]),
    ("TPU v5e", CHIPS["v5e"]),
    ("TPU v5", CHIPS["v5p"]),
    ("TPU v4", CHIPS["v4"]),
    ("NVIDIA H200", CHIPS["h200"]),
    ("NVIDIA H100 PCIe", Chip("h100-pcie", "cuda", flops=756e12)),
    ("NVIDIA H100 NVL", Chip("h100-nvl", "cuda", flops=835e12)),
    ("NVIDIA H100", CHIPS["h100"]),
    ("NVIDIA A100", CHIPS["a100"]),
    ("cpu", CHIPS["cpu"]),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device of JAX, by its `device_kind`; None: not in the table.

    >>> chip_of("NVIDIA H100 80GB HBM3").name, chip_of("TPU v5 lite").name, chip_of("cpu").name, chip_of("NVIDIA T4")
    ('h100', 'v5e', 'cpu', None)
    """
    return next((chip for name, chip in DEVICE_KINDS if device_kind.lower().startswith(name.lower())), None)
