"""A roofline model: the least time a step can take on given chips, and the resulting MFU."""

from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxformer.plan.topology import Topology


def link_speed(topology: Topology, mesh: Mesh, axes: str) -> float | None:
    """Bytes/s that one device can send along mesh axes ("fsdp", "data+fsdp", ...); None: unknown.

    TPU: the links of one axis of the torus, or of all of them if the mesh axes cover the whole slice. GPU: NVLink if
    each group is within a node; otherwise the network cards of all its members on one node.
    """
    chip = topology.chip
    if chip.link is None:
        return None
    names = [a for a in axes.split("+") if a in mesh.shape]
    members = int(np.prod([1, *(mesh.shape[a] for a in names)]))
    if chip.platform == "tpu":
        return chip.link * (max(1, sum(n > 1 for n in topology.shape)) if members == mesh.size else 1)
    index = {device: i for i, device in enumerate(topology.devices)}
    numbers = np.vectorize(lambda d: index[d], otypes=[int])(mesh.devices)
    along = [i for i, a in enumerate(mesh.axis_names) if a in names]
    group = numbers.transpose(along + [i for i in range(numbers.ndim) if i not in along]).reshape(members, -1)[:, 0]
    nodes, together = np.unique(group // topology.per_node, return_counts=True)
    if len(nodes) <= 1 or chip.network is None:
        return chip.link
    return min(chip.link, float(together.min()) * chip.network)


def roofline(
    topology: Topology, mesh: Mesh, flops: float, traffic: float, sent: list[dict[str, Any]], model_flops: float
) -> dict[str, Any] | None:
    """Seconds of one update if compute, memory and links each ran at their peak; None for an unknown chip.

    Args:
      topology, mesh: the devices.
      flops, traffic: of one device, see `costs`.
      sent: rows of collectives, with "axes" and "bytes" of one device.
      model_flops: of the model in one update, over all devices.

    Returns:
      compute, memory, links (of all axes, one after another): seconds; step: the longest of these, if all three overlap
      perfectly; no_overlap: compute or memory, then links; bound: the name of the longest; utilisation and
      utilisation_no_overlap: MFU at `step` and at `no_overlap`.
    """
    chip = topology.chip
    if chip.flops is None or chip.bandwidth is None:
        return None
    times = {"compute": flops / chip.flops, "memory": traffic / chip.bandwidth}
    times["links"] = sum(row["bytes"] / (link_speed(topology, mesh, row["axes"]) or 1.0) for row in sent)
    bound = max(times, key=lambda name: times[name])
    step = times[bound]
    alone = max(times["compute"], times["memory"]) + times["links"]
    ideal = model_flops / (chip.flops * mesh.size)
    return {
        **times,
        "step": step,
        "no_overlap": alone,
        "bound": bound,
        "utilisation": ideal / step,
        "utilisation_no_overlap": ideal / alone,
    }
