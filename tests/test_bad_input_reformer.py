"""What a Reformer or a Funnel cannot be; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import TINY, expected, place

__all__ = ["place"]

LSH = ["--config.model.attention=lsh", "--config.model.attention.num_heads=2"]

FUNNEL = [
    "--config.model.family=funnel", "--config.model.attention=funnel", "--config.model.attention.num_heads=2",
    "--config.model.positions=none", "--config.model.block=post_norm", "--config.data.objective=masked",
]  # fmt: skip
LAYERS = ["--config.model.num_layers=5"]


@pytest.mark.parametrize(
    "flags, case",
    [
        ([*LSH, "--config.model.attention.buckets=7"], "odd number of hash buckets"),
        ([*LSH, "--config.model.attention.buckets=1024,2048"], "more hash buckets than there may be"),
        ([*LSH, "--config.model.attention.buckets=()"], "no hash buckets"),
        ([*LSH, "--config.data.objective=prefix_lm"], "hashed attention with prefixes"),
        ([*LSH, "--config.mesh.context=2"], "hashed attention of rows in parts"),
        ([*FUNNEL, "--config.model.funnel.blocks=4,4,4"], "blocks that are not the layers"),
        ([*FUNNEL, *LAYERS, "--config.model.funnel.decoder_layers=10000"], "too many layers of a funnel's decoder"),
        ([*FUNNEL, *LAYERS, "--config.model.context_length=18"], "rows that cannot be pooled"),
        ([*FUNNEL, *LAYERS], "packed rows with a separate CLS"),
        ([*FUNNEL, *LAYERS, "--config.model.positions=learned"], "funnel with positions"),
        (["--config.model.attention=funnel"], "funnel's attention without a funnel"),
        (
            [f"--config.model.{x}" for x in ("block=reversible", "attention.window=4", "attention.global_every=2")],
            "reversible layers that differ",
        ),
        (["--config.execution.feed_forward_chunks=3"], "chunks not dividing the row"),
    ],
)
def test_it_is_refused(place, flags, case):
    tiny = [flag for flag in TINY if "num_heads" not in flag or "attention" not in " ".join(flags)]
    assert place.pretrain(*tiny, *flags) == (2, expected()[case])
