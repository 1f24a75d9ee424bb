"""Classes of transformers with the head of a task, random weights: read here, and ours, opened there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.interchange.exporting import export_model
from jaxformer.interchange.importing import import_model
from jaxformer.models.families import family_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
V, T = 50, 24
TOKENS = np.random.default_rng(0).integers(3, V, (3, T))
PADDING = {"pad_token_id": 1}
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V,
    "max_position_embeddings": T + 2, **PADDING,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p", "position_buckets": 4}
STEMS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "longformer": ("Longformer", {"attention_window": 8}),
    "deberta-v2": ("DebertaV2", {**DEBERTA, "max_relative_positions": 16}),
    "distilbert": ("DistilBert", {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 48}),
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": T}),
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}
SEQUENCE, TOKEN, ANSWER = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
TOLD = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
CASES = [(kind, SEQUENCE, TOLD) for kind in STEMS]
CASES += [(kind, name, {}) for kind in list(STEMS)[:5] for name in (TOKEN, ANSWER)]
CASES += [("bert", SEQUENCE, {"num_labels": 1}), ("gpt2", SEQUENCE, {"num_labels": 1})]
CASES += [("deberta-v2", SEQUENCE, {"pooler_hidden_act": "tanh"})]


def theirs(kind, name, more):
    import torch
    import transformers

    torch.manual_seed(0)
    stem, fields = STEMS[kind]
    config = getattr(transformers, f"{stem}Config")(**SIZES | fields | more)
    made = getattr(transformers, stem + name)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def outputs(model, tokens=TOKENS):
    import torch

    where = {"global_attention_mask": (torch.arange(T) == 0)[None].expand(tokens.shape).long()}
    with torch.no_grad():
        found = model(input_ids=torch.tensor(tokens), **(where if model.config.model_type == "longformer" else {}))
    return (
        torch.stack([found.start_logits, found.end_logits], -1) if "start_logits" in found else found.logits
    ).numpy()


@pytest.mark.parametrize("kind, name, more", CASES, ids=[f"{kind}{name}{len(more)}" for kind, name, more in CASES])
def test_heads_both_ways(kind, name, more, tmp_path):
    from safetensors.numpy import load_file

    model = theirs(kind, name, more)
    model.save_pretrained(tmp_path / "theirs")
    found = import_model(tmp_path / "theirs")
    wanted = outputs(model)
    ones = jnp.ones(TOKENS.shape, int)
    logits = jax.jit(lambda p: family_of(found.config).apply(p, jnp.asarray(TOKENS), found.config, segments=ones))(
        found.params
    )
    if name == SEQUENCE:
        logits = logits[:, -1 if found.config.causal else 0]
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=2e-5)
    if name != ANSWER and "num_labels" not in more:
        assert found.labels == (("no", "perhaps", "yes") if more is TOLD else ("LABEL_0", "LABEL_1"))
    assert (
        export_model(found.config, found.params, tmp_path / "ours", labels=found.labels, special_tokens=PADDING) == kind
    )
    a, b = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    assert again.config.id2label == model.config.id2label
    assert all((there == here).all() for there, here in zip(again.parameters(), model.parameters(), strict=True))
    # Bit for bit, but for one column: where in memory the weights begin decides how torch rounds that product.
    np.testing.assert_allclose(outputs(again), wanted, rtol=0, atol=1e-7 if "num_labels" in more else 0)


def test_what_a_head_cannot_be(tmp_path):
    model = theirs("bert", SEQUENCE, {"problem_type": "multi_label_classification"})
    model.save_pretrained(tmp_path / "many")
    with pytest.raises(ConfigError, match=r"^config.json: problem_type: 'multi_label_classification'; accepted: sing"):
        import_model(tmp_path / "many")
    theirs("deberta-v2", SEQUENCE, {"pooler_hidden_act": "silu"}).save_pretrained(tmp_path / "silu")
    with pytest.raises(ConfigError, match=r"^config.json: pooler_hidden_act: 'silu'; accepted: 'tanh', 'gelu', 'relu'"):
        import_model(tmp_path / "silu")
