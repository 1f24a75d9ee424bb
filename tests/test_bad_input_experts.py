"""What a mixture of experts cannot be; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import TINY, expected, place

__all__ = ["place"]

EXPERTS = ["--config.model.feed_forward=experts"]
CHOICE = [*EXPERTS, "--config.model.feed_forward.dispatch=expert_choice"]
FIELD = "--config.model.feed_forward"
BERT = ["--config.model.family=bert", "--config.data.objective=masked"]


@pytest.mark.parametrize(
    "flags, case",
    [
        (
            [*EXPERTS, f"{FIELD}.every=2", "--config.model.num_layers=3"],
            "experts in every so many layers that do not divide",
        ),
        (
            [*EXPERTS, f"{FIELD}.every=2", "--config.model.num_layers=2", "--config.model.block=parallel"],
            "layers of experts and others in parallel blocks",
        ),
        ([*EXPERTS, f"{FIELD}.dense_activation=geglu"], "dense layers between experts where there are none"),
        (["--config.execution.expert_exchange=gather"], "how experts meet tokens where there are none"),
        ([*EXPERTS, "--config.execution.expert_exchange=all_to_all"], "an all-to-all of any number of tokens"),
        (
            [*CHOICE, *BERT, "--config.execution.expert_exchange=ragged_all_to_all"],
            "experts that choose any number of tokens",
        ),
        ([*EXPERTS, "--config.model.family=recurrent"], "experts where there are no feed-forward layers"),
        ([*EXPERTS, "--config.execution.feed_forward_chunks=2"], "experts in parts of a row"),
        ([*EXPERTS, f"{FIELD}.top_k=9"], "more experts for a token than there are"),
        ([*EXPERTS, f"{FIELD}.top_k=1", f"{FIELD}.renormalize=true"], "a single gate that is normalised"),
        ([*EXPERTS, f"{FIELD}.capacity_factor=1.5"], "a capacity where nothing is dropped"),
        (CHOICE, "experts that choose in a causal model"),
        ([*EXPERTS, "--config.model.block=reversible"], "experts in reversible layers"),
        (
            [
                *EXPERTS,
                "--config.model.family=transformer_xl",
                "--config.model.memory=8",
                "--config.model.positions=rotary",
            ],
            "experts of two streams",
        ),
        ([*EXPERTS, "--config.execution.experts=megablox"], "products of experts that need a TPU"),
        ([*EXPERTS, "--config.execution.experts=blocks_gpu"], "products of experts that need a GPU"),
        (
            [*EXPERTS, f"{FIELD}.dispatch=capacity", "--config.mesh.data=1", "--config.mesh.context=8"],
            "experts of some capacity and rows in parts",
        ),
        (["--config.mesh.data=1", "--config.mesh.expert=8"], "a mesh that splits experts which are not there"),
        (
            [*EXPERTS, f"{FIELD}.count=4", "--config.mesh.data=1", "--config.mesh.expert=8"],
            "a mesh that does not divide the experts",
        ),
    ],
)
def test_it_is_refused(place, flags, case):
    code, line = place.pretrain(*TINY, *flags)
    assert (code, line) == (2, expected()[case])
