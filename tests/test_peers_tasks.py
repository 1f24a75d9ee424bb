"""Heads of tasks in transformers with random weights, and here: the same logits and losses. Metrics: scikit-learn's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import HeadConfig, LossConfig
from jaxformer.interchange.importing import import_model
from jaxformer.models.families import HEADS, family_of
from jaxformer.training import task_metrics
from jaxformer.types import Batch

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
B, T, V, C = 3, 24, 50, 4
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, V, (B, T))
BERT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V,
        "max_position_embeddings": T}  # fmt: skip
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": V, "n_positions": T, "bos_token_id": 0,
        "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
FIRST = np.eye(1, T, dtype=np.float32).repeat(B, axis=0)


def theirs(kind, fields, backbone, carrier, folder):
    """Their model, and its backbone as ours: saved inside a model that is read here."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, "GPT2Config" if kind.startswith("GPT2") else "BertConfig")(num_labels=C, **fields)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    outer = getattr(transformers, carrier)(config)
    setattr(outer, backbone, getattr(model, backbone))
    outer.tie_weights()
    outer.save_pretrained(folder)
    found = import_model(folder)
    return model, found.config, {k: v for k, v in found.params.items() if k not in ("head", "next_sentence")}


def ours(cfg, params, task, outputs, layer, targets, weights, **inputs):
    """(logits, loss) of our head, whose projection is `layer` of torch."""
    cfg = replace(cfg, head=HeadConfig(task, outputs))
    bias = np.zeros(outputs) if layer.bias is None else layer.bias.detach().numpy()
    params = params | {"task": {"w": layer.weight.detach().numpy().T, "b": bias}}
    places = np.broadcast_to(np.arange(T), (B, T))
    batch = Batch(TOKENS, targets, weights, places, np.ones((B, T), int), {"examples": FIRST, **inputs})
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32), batch)
    family = family_of(cfg)
    assert family.specs(cfg).keys() == params.keys()

    @jax.jit
    def both(params):
        objective, _ = family.loss(params, batch, cfg, LossConfig())
        return family.apply(params, batch.tokens, cfg, segments=batch.segments), objective["loss"]

    logits, (total, weight) = both(params)
    return logits, total / weight


def outcome(model, **inputs):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS), **{k: torch.tensor(v) for k, v in inputs.items()})


def agree(ours, theirs):
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=2e-5)


def test_bert_for_sequence_classification(tmp_path):
    model, cfg, params = theirs("BertForSequenceClassification", BERT, "bert", "BertForPreTraining", tmp_path)
    labels = RNG.integers(0, C, B)
    wanted = outcome(model, labels=labels)
    logits, loss = ours(cfg, params, "sequence_classification", C, model.classifier, FIRST * labels[:, None], FIRST)
    agree(logits[:, 0], wanted.logits)
    agree(loss, wanted.loss)


def test_bert_for_regression(tmp_path):
    model, cfg, params = theirs("BertForSequenceClassification", BERT, "bert", "BertForPreTraining", tmp_path)
    import torch

    model.classifier, model.num_labels, model.config.num_labels = torch.nn.Linear(32, 1), 1, 1
    values = RNG.normal(size=B).astype(np.float32)
    wanted = outcome(model, labels=values)
    task = ("regression", HEADS["regression"].count, model.classifier)
    logits, loss = ours(cfg, params, *task, np.zeros((B, T), int), FIRST, values=FIRST * values[:, None])
    agree(logits[:, 0], wanted.logits)
    agree(loss, wanted.loss)


def test_bert_for_token_classification(tmp_path):
    model, cfg, params = theirs("BertForTokenClassification", BERT, "bert", "BertForMaskedLM", tmp_path)
    labels = RNG.integers(-1, C, (B, T))
    wanted = outcome(model, labels=np.where(labels < 0, -100, labels))
    weights = (labels >= 0).astype(np.float32)
    logits, loss = ours(cfg, params, "token_classification", C, model.classifier, np.maximum(labels, 0), weights)
    agree(logits, wanted.logits)
    agree(loss, wanted.loss)


def test_bert_for_question_answering(tmp_path):
    model, cfg, params = theirs("BertForQuestionAnswering", BERT, "bert", "BertForMaskedLM", tmp_path)
    import torch

    model.qa_outputs = torch.nn.Linear(32, 2)
    start, end = np.array([0, 3, 9]), np.array([0, 5, 9])
    wanted = outcome(model, start_positions=start, end_positions=end)
    flags = [np.eye(T, dtype=int)[place] for place in (start, end)]
    spans = {"starts": flags[0], "ends": flags[1], "places": np.ones((B, T), int)}
    nothing = np.zeros((B, T), int)
    logits, loss = ours(cfg, params, "extractive_qa", 2, model.qa_outputs, nothing, FIRST, **spans)
    agree(logits, torch.stack([wanted.start_logits, wanted.end_logits], -1))
    agree(loss, wanted.loss)


def test_gpt2_for_sequence_classification(tmp_path):
    model, cfg, params = theirs("GPT2ForSequenceClassification", GPT2, "transformer", "GPT2LMHeadModel", tmp_path)
    labels = RNG.integers(0, C, B)
    wanted = outcome(model, labels=labels)
    logits, loss = ours(cfg, params, "sequence_classification", C, model.score, FIRST * labels[:, None], FIRST)
    agree(logits[:, -1], wanted.logits)
    agree(loss, wanted.loss)


@pytest.mark.parametrize("labels", [2, 5])
def test_f1_and_matthews_are_those_of_scikit_learn(labels):
    metrics = pytest.importorskip("sklearn.metrics")
    predicted, targets = RNG.integers(0, labels, (2, 40, 7))
    targets = np.where(RNG.random((40, 7)) < 0.5, predicted, targets)
    weights = (RNG.random((40, 7)) < 0.7).astype(float)
    found = task_metrics.classification(predicted, targets, weights, labels)
    mine, real = predicted[weights > 0], targets[weights > 0]
    wanted = metrics.f1_score(real, mine, average="binary" if labels == 2 else "macro")
    assert found["f1"].mean == pytest.approx(wanted, rel=1e-12)
    assert found["matthews"].mean == pytest.approx(metrics.matthews_corrcoef(real, mine), rel=1e-12)
