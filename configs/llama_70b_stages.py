"""llama_70b over nodes: a pipeline of 8 stages, each over whole nodes of 8 devices.

jaxformer pretrain llama_70b_stages --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """Ten layers a stage, split over 8 neighbours; only activations go from node to node, in 64 micro-batches, of
    whose ticks 90 % are useful, and gradients once. For 64 devices or a multiple of up to 1024."""
    config = ConfigDict(load("llama_70b"))
    config.mesh.update({"data": None, "fsdp": 1, "stage": 8, "tensor": 8})
    config.execution.gradient_accumulation_steps = 64
    return config
