"""Settings of XLNet and Transformer-XL that cannot work, provoked as a user would meet them; the lines stand in
bad_input.md."""

import pytest
from bad_input_cases import expected, place

__all__ = ["place"]

XLNET = ["--config.model.family=xlnet", "--config.data.objective=permutation"]
XL = ["--config.model.family=transformer_xl", "--config.data.objective=segment_recurrence"]

# case -> flags of pretrain
CONFIGS = {
    "memory of a model that has none": ["--config.model.memory=8"],
    "transformer-xl without a memory": [*XL, "--config.model.positions=relative"],
    "chunks not dividing the memory": [
        *XL, "--config.model.positions=relative", "--config.model.memory=6", "--config.execution.feed_forward_chunks=4",
    ],
    "transformer-xl with absolute positions": [*XL, "--config.model.memory=8"],
    "xlnet with absolute positions": XLNET,
    "xlnet with a window": [*XLNET, "--config.model.positions=relative", "--config.model.attention.window=4"],
    "a context axis with a family of whole rows": [
        *XLNET, "--config.model.positions=rotary", "--config.mesh.data=1", "--config.mesh.context=8",
    ],
    "xlnet of reversible layers": [
        *XLNET, "--config.model.positions=relative", "--config.model.block=reversible",
    ],
    "transformer-xl of layers that differ": [
        *XL, "--config.model.memory=8", "--config.model.positions=relative", "--config.model.attention.window=4",
        "--config.model.attention.global_every=2", "--config.model.num_layers=2",
    ],
    "positions of queries and keys without those": [
        "--config.model.family=bert", "--config.data.objective=masked", "--config.model.attention=longformer",
        "--config.model.positions=disentangled",
    ],
    "several positions, none for the attention": [
        "--config.model.positions=t5 or alibi", "--config.model.attention=linear",
    ],
    "relative positions of an odd width": ["--config.model.positions=relative", "--config.model.width=15",
                                           "--config.model.num_heads=3"],
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(place, case):
    assert place.pretrain(*CONFIGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
