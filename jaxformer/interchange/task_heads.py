"""The heads of tasks in transformers: its classes ...ForSequenceClassification, ...ForTokenClassification and
...ForQuestionAnswering, as `model.head` here.

>>> found = heads("Bert", pooler="bert.pooler.dense")
>>> found["regression"].architecture, found["extractive_qa"].task
('BertForSequenceClassification', 'qa_outputs')
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import HeadConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange.pattern import Pattern

SUFFIXES = {
    "sequence_classification": "ForSequenceClassification", "regression": "ForSequenceClassification",
    "token_classification": "ForTokenClassification", "extractive_qa": "ForQuestionAnswering",
}  # fmt: skip
POOLED = HeadConfig.POOLED
REGRESSION = "regression"
LABELLED = ("sequence_classification", "token_classification")  # whose outputs have names


class ForeignHead(NamedTuple):
    """The head of one task in one architecture.

    Attributes:
      architecture: the class.
      task: the module of the projection, whole name.
      pooler: the module before it; None: there is none.
      bias: whether the projection has one.
      activation: name of the field of config.json that says the pooler's; or the one that it always has.
    """

    architecture: str
    task: str
    pooler: str | None = None
    bias: bool = True
    activation: str = "tanh"


def heads(
    stem: str, *, pooler: str, sequence: str = "classifier", activation: str = "tanh", without: Sequence[str] = ()
) -> dict[str, ForeignHead]:
    """Task -> head of a bidirectional architecture whose classes begin with `stem`."""
    modules = {**dict.fromkeys(POOLED, sequence), "token_classification": "classifier", "extractive_qa": "qa_outputs"}
    return {
        task: ForeignHead(f"{stem}{SUFFIXES[task]}", module, pooler if task in POOLED else None, activation=activation)
        for task, module in modules.items()
        if task not in without
    }


def causal_heads(stem: str) -> dict[str, ForeignHead]:
    """Task -> head of a causal architecture, which reads an example's last token and has no bias."""
    return {task: ForeignHead(f"{stem}{SUFFIXES[task]}", "score", bias=False) for task in POOLED}


def names_of(head: ForeignHead) -> dict[str, tuple[str, Pattern]]:
    """Dotted path of ours -> whole name and pattern."""
    modules = {"task": head.task} | ({} if head.pooler is None else {"pooler": head.pooler})
    found = {}
    for ours, theirs in modules.items():
        found[f"{ours}.w"] = f"{theirs}.weight", Pattern("o i -> i o")
        if head.bias or ours != "task":
            found[f"{ours}.b"] = f"{theirs}.bias", Pattern("d -> d")
    return found


def read_head(known: Mapping[str, ForeignHead], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our `model.head` of a config.json; None: its class has none of these heads.

    Raises:
      ConfigError: the head learns several labels at once, or its pooler is none of ours.
    """
    classes = about.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    tasks = [task for task, head in known.items() if head.architecture == named]
    if not tasks:
        return None
    labels = labels_of(about)
    if about.get("problem_type") == "multi_label_classification":
        raise ConfigError(
            "config.json: problem_type: 'multi_label_classification'; accepted: single_label_classification, regression"
        )
    number = about.get("problem_type") == REGRESSION or (about.get("problem_type") is None and len(labels) == 1)
    task = REGRESSION if REGRESSION in tasks and number else tasks[0]
    head = known[task]
    if task == REGRESSION and len(labels) != 1:
        raise ConfigError(f"config.json: {len(labels)} labels; accepted in a regression: one")
    outputs = 2 if task == "extractive_qa" else len(labels)
    activation = about.get(head.activation, "gelu") if "_" in head.activation else head.activation
    if head.pooler is not None and activation not in HeadConfig.ACTIVATIONS:
        accepted = ", ".join(map(repr, HeadConfig.ACTIVATIONS))
        raise ConfigError(f"config.json: {head.activation}: {activation!r}; accepted: {accepted}")
    pooler = {} if head.pooler is None else {"activation": activation}
    return {"task": task, "outputs": outputs, "use_bias": head.bias, **pooler}


def labels_of(about: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels in a config.json, in order. Raises ConfigError: they are no names."""
    named, count = about.get("id2label"), about.get("num_labels", 2)
    try:
        if named is None:
            named = {number: f"LABEL_{number}" for number in range(count)}
        found = {int(number): str(name) for number, name in named.items()}
        if sorted(found) != list(range(len(found))) or not found:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f'config.json: id2label: {about.get("id2label", count)!r}; accepted: {{"0": name, "1": name, ...}}'
        ) from None
    return tuple(found[number] for number in range(len(found)))


def write_head(head: ForeignHead, cfg: ModelConfig, labels: Sequence[str] = ()) -> dict[str, Any]:
    """What config.json says of a head."""
    assert cfg.head is not None
    names = labels or [f"LABEL_{number}" for number in range(cfg.head.outputs or 1)]
    field = {head.activation: cfg.head.activation} if "_" in head.activation else {}
    task = {"regression": REGRESSION, "sequence_classification": "single_label_classification"}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": task.get(str(cfg.head.task)), "classifier_dropout": cfg.head.dropout, **field,
    }  # fmt: skip
