"""The table of chips: every device is found by its name, and nothing that others know is contradicted."""

import pytest

from jaxformer.errors import ConfigError
from jaxformer.plan.topology import parse
from jaxformer.runtime.hardware import CHIPS, DEVICE_KINDS, chip_of

NAMES = {
    "TPU v4": "v4", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "v7x",
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA GB200": "gb200", "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X VF": "mi300x", "AMD Instinct MI325X": "mi325x",
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_devices_are_found_by_their_names(kind):
    assert chip_of(kind).name == NAMES[kind]


def test_unknown_devices_have_no_chip():
    assert [chip_of(kind) for kind in ("NVIDIA B300", "TPU v3", "AMD Instinct MI250X", "gfx942:sramecc+")] == [None] * 4


def test_a_longer_name_comes_before_one_that_begins_it():
    names = [name.lower() for name, _ in DEVICE_KINDS]
    assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if b.startswith(a)]


@pytest.mark.parametrize("version", ["v4", "v5e", "v5p", "v6e", "7x"])
def test_tpus_are_as_jax_has_them(version):
    """Pallas keeps a table of its own, per core; a device is a core, or two of v4 and v5p."""
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    cores = 2 if version in ("v4", "v5p") else 1
    theirs = info.get_tpu_info_for_chip(info.ChipVersion(version), cores)
    ours = CHIPS[version if version.startswith("v") else f"v{version}"]
    assert ours.flops == pytest.approx(cores * theirs.bf16_ops_per_second, rel=0.03)
    # Of v5p they have 2.46 TB/s, where Google's page says 2765 GB/s.
    assert ours.bandwidth == pytest.approx(
        cores * theirs.mem_bw_bytes_per_second, rel=0.13 if version == "v5p" else 0.05
    )
    assert ours.memory == pytest.approx(cores * theirs.hbm_capacity_bytes, rel=0.09)


def test_peaks_are_dense_and_rise_from_one_generation_to_the_next():
    for old, new in (("v5e", "v6e"), ("v5p", "v7x"), ("a100", "h100"), ("h100", "b200"), ("b200", "gb200")):
        assert 1 < CHIPS[new].flops / CHIPS[old].flops < 5
    for chip in CHIPS.values():
        if chip.flops:  # operations for each byte: every accelerator of the last years has 100 to 600
            assert 100 < chip.flops / chip.bandwidth < 600, chip.name


@pytest.mark.parametrize("name", ["mi300x:1x8", "v7x:2x2x2"])
def test_chips_that_no_compiler_here_knows_have_no_plan(name):
    with pytest.raises(ConfigError, match=rf"^--topology: '{name}' is not known"):
        parse(name)
