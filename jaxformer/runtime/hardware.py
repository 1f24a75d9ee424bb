"""A table of chips, for plans and for the MFU of a run, with the vendors' numbers.

Dense bfloat16 peaks, memory and its bandwidth: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e), NVIDIA's data sheets of
the H100 (SXM5, PCIe, NVL), H200 SXM and A100 SXM4 80GB. Links of a TPU, one direction of one link: Austin et al. 2025,
"How to Scale Your Model", chapter 2. NVLink: data sheets, one direction. Between nodes: one ConnectX-7 (400 Gb/s) per
H100 or H200, one ConnectX-6 (200 Gb/s) per A100, as in the vendors' own eight-GPU machines.

v6e and v7x (Ironwood), cloud.google.com/tpu/docs/v6e and /tpu7x (2026): of v7x 2307 TFLOP/s, 192 GiB, 7380 GB/s and
1200 GB/s of links for a chip, on which JAX sees two devices, each of half that; memory reserved as on v6e. B200, data
sheet of the DGX B200 (NVIDIA 2025): of eight 72 PFLOP/s of FP8 with sparsity, a quarter of which is dense bfloat16,
1440 GB, 64 TB/s. GB200, data sheet of the GB200 NVL72 (NVIDIA 2025): of 72 GPUs 360 PFLOP/s of bfloat16 with sparsity,
half of which is dense, 13.4 TB, 576 TB/s. NVLink 5 of both: 900 GB/s. MI300X and MI325X, data sheets (AMD 2023, 2024):
1307.4 TFLOP/s, 192 and 256 GB, 5.3 and 6 TB/s, seven links of 64 GB/s. These sheets as others quote them. One adapter
of 400 Gb/s for each of these GPUs. Chips without a form in plan.topology have no plans, only an MFU.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: as in a topology, "v5e".
      platform: "tpu", "cuda", "rocm" or "cpu".
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
        Chip("v7x", "tpu", 0.98 * 96 * GIB, 1153.5e12, 3.69e12, 1e11, 3),
        Chip("b200", "cuda", 0.95 * 1440e9 / 8, 2250e12, 8e12, 9e11, 0, 5e10),
        Chip("gb200", "cuda", 0.95 * 13.4e12 / 72, 2500e12, 8e12, 9e11, 0, 5e10),
        Chip("mi300x", "rocm", 0.95 * 192e9, 1307.4e12, 5.3e12, 7 * 6.4e10, 0, 5e10),
        Chip("mi325x", "rocm", 0.95 * 256e9, 1307.4e12, 6e12, 7 * 6.4e10, 0, 5e10),
        Chip("cpu", "cpu"),
    )
}


# How the names that JAX gives to devices begin, the longer of two before the shorter. Nobody here has seen these on
# such a device: TPU7x (as pallas's tpu_info lists it), NVIDIA B200 and GB200 (as nvidia-smi prints them), AMD Instinct
# (as pull request 37634 of jax quotes MI300X; a driver that has no names says "gfx942:...", which is no entry).
DEVICE_KINDS = (
    ("TPU7x", CHIPS["v7x"]),
    ("TPU v6 lite", CHIPS["v6e"]),
    ("TPU v6e", CHIPS["v6e"]),
    ("TPU v5 lite", CHIPS["v5e"]),
    ("TPU v5e", CHIPS["v5e"]),
    ("TPU v5", CHIPS["v5p"]),
    ("TPU v4", CHIPS["v4"]),
    ("NVIDIA GB200", CHIPS["gb200"]),
    ("NVIDIA B200", CHIPS["b200"]),
    ("AMD Instinct MI300X", CHIPS["mi300x"]),
    ("AMD Instinct MI325X", CHIPS["mi325x"]),
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
    >>> [chip_of(kind).name for kind in ("TPU7x", "NVIDIA GB200", "NVIDIA B200", "AMD Instinct MI300X VF")]
    ['v7x', 'gb200', 'b200', 'mi300x']
    """
    return next((chip for name, chip in DEVICE_KINDS if device_kind.lower().startswith(name.lower())), None)
