"""THE table of architectures of the library transformers: model_type of config.json -> what it is here."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxformer.config import Config, ModelConfig, diff, from_mapping, to_dict
from jaxformer.config.fields import nearest, shown
from jaxformer.errors import ConfigError
from jaxformer.interchange import (
    hf_bart,
    hf_bert,
    hf_deberta,
    hf_experts,
    hf_gemma,
    hf_gpt2,
    hf_llama,
    hf_longformer,
    hf_neox,
    hf_phi3,
    hf_roberta,
    hf_t5,
)
from jaxformer.interchange.foreign import LAYER, Foreign
from jaxformer.interchange.task_heads import read_head, write_head

MOST_LAYERS = 10_000  # more are a mistake in config.json

ARCHITECTURES: dict[str, Foreign] = {
    "gpt2": hf_gpt2.GPT2,
    "llama": hf_llama.LLAMA,
    "mistral": hf_llama.MISTRAL,
    "qwen2": hf_llama.QWEN2,
    "qwen3": hf_llama.QWEN3,
    "phi3": hf_phi3.PHI3,
    "mixtral": hf_experts.MIXTRAL,
    "qwen3_moe": hf_experts.QWEN3_MOE,
    "olmoe": hf_experts.OLMOE,
    "gpt_neox": hf_neox.NEOX,
    "gemma": hf_gemma.GEMMA,
    "gemma2": hf_gemma.GEMMA2,
    "gemma3_text": hf_gemma.GEMMA3,
    "bert": hf_bert.BERT,
    "roberta": hf_roberta.ROBERTA,
    "distilbert": hf_roberta.DISTILBERT,
    "longformer": hf_longformer.LONGFORMER,
    "deberta-v2": hf_deberta.DEBERTA,
    "t5": hf_t5.T5,
    "bart": hf_bart.BART,
}


def architecture_of(model_type: Any) -> Foreign:
    """Raises ConfigError: there is none of this model_type."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        near = nearest(str(model_type), ARCHITECTURES)
        hint = f"did you mean {near}?" if near else f"accepted: {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"config.json: model_type: {model_type!r}; {hint}")
    return ARCHITECTURES[model_type]


def type_for(cfg: ModelConfig, preferred: str | None = None) -> str:
    """The model_type whose config.json says what a model of ours is: the first whose config, read again, is the same.

    Args:
      cfg: the model.
      preferred: is looked at first.

    Raises:
      ConfigError: there is none; with what the nearest one would make of it.
    """
    names = sorted(ARCHITECTURES, key=lambda name: name != preferred)
    known = {name: ARCHITECTURES[name] for name in names if ARCHITECTURES[name].family == cfg.family}
    lost = {name: _lost(name, foreign, cfg) for name, foreign in known.items()}
    for name, lines in lost.items():
        if lines == []:
            return name
    told = {name: lines for name, lines in lost.items() if lines}
    if not told:
        kinds = f"{cfg.family} with {cfg.attention.kind} attention and {cfg.positions.kind} positions"
        kinds += "" if cfg.head is None else f" and a head for {cfg.head.task}"
        raise ConfigError(f"config.model: a {kinds} like this; accepted: what one of {', '.join(ARCHITECTURES)} can be")
    name = min(told, key=lambda each: (any(".kind: " in line for line in told[each]), len(told[each])))
    raise ConfigError(
        f"config.model.{'; '.join(told[name])}: {name}, the nearest architecture of transformers, would be like that; "
        f"accepted: what one of {', '.join(ARCHITECTURES)} can be"
    )


def _lost(name: str, foreign: Foreign, cfg: ModelConfig) -> list[str] | None:
    """Lines "field: value -> what it would be read as"; None: there is nothing like it at all."""
    try:
        names = [place.name for place in foreign.all_places(cfg).values()]
        again = read_model(foreign, write_model(name, cfg), names)
    except (AttributeError, KeyError, ConfigError):
        return None
    return diff(_explicit(cfg), _explicit(again))


def _explicit(cfg: ModelConfig) -> dict[str, Any]:
    """What a model computes, with nothing left to defaults; not how it begins or rounds."""
    tree = to_dict(cfg)
    for name in ("initializer", "dtype"):
        del tree[name]
    if cfg.head is not None:
        del tree["head"]["dropout"]  # of the training
    tree["feed_forward"]["width"] = cfg.feed_forward.hidden_width(cfg.width)
    if cfg.feed_forward.has_experts:
        tree["feed_forward"]["renormalize"] = cfg.feed_forward.normalized
        for name in ("balance", "z_loss"):  # of the training
            del tree["feed_forward"][name]
    if cfg.encoder is not None:
        tree["encoder"]["num_layers"] = cfg.num_layers if cfg.encoder.num_layers is None else cfg.encoder.num_layers
    if "num_kv_heads" in tree["attention"]:
        tree["attention"] |= {"num_kv_heads": cfg.attention.kv_heads, "head_width": cfg.head_size}
    if tree["positions"].get("scaling", "none") != "none":
        tree["positions"]["original_length"] = cfg.positions.original_length or round(
            cfg.context_length / cfg.positions.factor
        )
    return tree


def read_model(foreign: Foreign, about: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """The model that a config.json is; `names` of its tensors, without prefix.

    Raises:
      ConfigError: a field is none, or says what ours cannot be.
    """
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if (value := about.get(name)) is not None and (type(value) is not int or not 0 < value < MOST_LAYERS):
            raise ConfigError(f"config.json: {name}: {shown(value)}; accepted: 1 to {MOST_LAYERS - 1}")
    try:
        head = read_head(foreign.heads, about)
        return model_of(foreign.read_config(about, names) | ({} if head is None else {"head": head}))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"config.json: cannot be read as {about.get('model_type')} ({type(error).__name__}: {error}); accepted: "
            "values as its class in transformers writes them"
        ) from None


def write_model(name: str, cfg: ModelConfig, labels: Sequence[str] = ()) -> dict[str, Any]:
    """What config.json says of a model of ours as one of the type `name`."""
    foreign = ARCHITECTURES[name]
    head = foreign.head_of(cfg)
    of_task = {} if head is None else write_head(head, cfg, labels)
    return {"model_type": name, "architectures": [foreign.class_of(cfg)], **foreign.write_config(cfg), **of_task}


def model_of(mapping: dict[str, Any]) -> ModelConfig:
    """The checked config of a `model` section."""
    config: Config = from_mapping({"model": mapping, "data": data_for(mapping)})
    return config.model


def data_for(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What the `data` section has to say for a `model` section: an objective of its family."""
    if mapping.get("head") is not None:
        return {"objective": mapping["head"]["task"]}
    if mapping["family"] == "bert":
        return {"objective": "masked", "pairs": bool((mapping.get("bert") or {}).get("next_sentence"))}
    return {"objective": "denoising"} if mapping["family"] == "encoder_decoder" else {}


def number_of(name: str, template: str) -> int | None:
    """The layer in the name of a tensor, or None if it is not of this template."""
    found = re.fullmatch(re.escape(template).replace(re.escape(LAYER), r"(\d+)"), name)
    return int(found[1]) if found else None


def is_left_out(name: str, templates: Collection[str]) -> bool:
    """Whether a tensor holds nothing that is learned."""
    return any(name == each or (LAYER in each and number_of(name, each) is not None) for each in templates)
