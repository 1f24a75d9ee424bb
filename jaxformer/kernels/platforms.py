"""Which platform this process runs on, as the tables of implementations name them."""

import jax

GPU = "an NVIDIA GPU of compute capability 8 or more"  # "cuda" in words


def this_platform() -> str:
    """Of the first device: "cpu", "tpu", or "cuda" for the GPUs that `GPU` names; others as JAX calls them."""
    platform = jax.default_backend()
    capability = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return "cuda" if platform == "gpu" and capability.isdigit() and int(capability) >= 8 else platform
