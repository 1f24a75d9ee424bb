"""What an encoder-decoder is worth beside a GPT that reads source and target as one row: about two hours on 2 cores.

jaxformer compare compare_pairs --config.data.files=pairs.jsonl --config.data.validation_files=held_out.jsonl \
    --config.data.tokenizer_file=tokenizer.json

Both predict the same targets. `experiments/stretches.py` makes such files: stretches of texts, what follows each, and
their tokenizer.
"""

from jaxformer.config import load

SOURCE, TARGET = 192, 96  # tokens of a row

RECURRENT = {
    "model.family": "recurrent_seq2seq",
    "model.attention.kind": "alignment",
    "model.positions": "none",
    "model.block": "plain",
    "model.feed_forward.activation": "gelu",  # it has none
}


def get_config():
    """The ladder of `compare_mechanisms`; the baseline reads a pair as one row, by a template that adds nothing."""
    config = load("compare_mechanisms")
    config["model"] |= {"context_length": SOURCE + TARGET}
    config["data"] |= {
        "objective": "instructions",
        "text_field": "source",
        "labelled": {"label_field": "target", "template": "{content}"},
    }
    config["ladder"] |= {"min_tokens_per_parameter": 0.1}
    form = {
        "model.family": "encoder_decoder",
        "model.context_length": TARGET,
        "model.encoder.source_length": SOURCE,
        "data.objective": "pairs",
        "data.source_field": "source",
        "data.target_field": "target",
        "data.text_field": "text",
        "data.labelled": None,
    }
    config["variants"] = {
        "encoder_decoder": form,
        "one_layer_each": form | {"ladder.min_layers": 1},
        "bahdanau": form | RECURRENT | {"ladder.min_layers": 1},
    }
    return config
