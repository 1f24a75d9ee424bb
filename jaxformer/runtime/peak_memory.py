"""The most memory that a run has used so far."""

import sys

import jax

from jaxformer.runtime import coordination

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


def peak_memory() -> dict[str, int]:
    """Bytes used at most: `peak_device_bytes` on the fullest device, `peak_host_bytes` by the largest process; without
    what the platform does not tell (devices on CPU). All processes must call it."""
    mine: dict[str, int] = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if any(found := [each.get("peak_bytes_in_use", 0) for each in stats]):
        mine["peak_device_bytes"] = max(found)
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        mine["peak_host_bytes"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    everyone = coordination.gather(mine, "its memory")
    return {name: max(each.get(name, 0) for each in everyone) for name in mine}
