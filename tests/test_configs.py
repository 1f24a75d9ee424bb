"""Every config builds, and its real train step runs once, in shapes only and with as few layers as show it."""

from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jaxformer import config as configs
from jaxformer.config import Config, from_mapping
from jaxformer.config.model import period_of
from jaxformer.models.families import family_of
from jaxformer.models.flops import count_parameters
from jaxformer.modules import make_model
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.scaling.ladder import StudyConfig
from jaxformer.training.optim import make_optimizer, make_schedule
from jaxformer.training.state import state_shapes
from jaxformer.training.step import train_step

CONFIGS = sorted(p for p in (Path(__file__).parent.parent / "configs").glob("*.py") if p.name != "__init__.py")


def load(source):
    """The config of a file: of a scaling study, where it has a ladder."""
    mapping = configs.load(str(source))
    mapping.pop("variants", None)  # of a comparison
    return from_mapping(mapping, cls=StudyConfig if "ladder" in mapping else Config)


LARGE = {
    "funnel_tiny",
    "gpt2_124m",
    "gpt2_350m",
    "gpt2_1_5b",
    "llama_1b",
    "llama_7b",
    "llama_70b",
    "llama_70b_stages",
    "mixtral_8x7b",
    "olmoe_1b_7b",
    "glam_64b_64e",
    "bert_base",
    "transformer_base",
    "bart_base",
    "bart_tiny",
    "deberta_base",
    "deberta_tiny",
    "t5_small",
    "transformer_xl_tiny",
    "ul2_tiny",
    "xlnet_base",
    "xlnet_tiny",
    "longformer_tiny",
    "longformer_base",
    "bigbird_tiny",
    "bigbird_base",
    "compare_ablations",
    "compare_mechanisms",
    "compare_pairs",
    "compare_tiny",
    "denoising_entropy",
    "pretraining_objectives",
    "scaling_bert",
    "scaling_entropy",
    "transduction",
    "tune_exception_type",
    "tune_token_kinds",
    "expert_languages",
    "gpt_mixture",
    "gpt_shakespeare_char",
    "gpt_shakespeare_gpu",
    "scaling_three_decades",
    "scaling_gpt",
}  # tracing them takes seconds


def of_few_layers(model):
    """Two layers of every stack, or as many as differ: the others are traced alike, and take longer."""
    if model.family == "funnel":  # whose blocks say how many
        return model
    few, encoder = max(2, len(period_of(model))), model.encoder
    if encoder is not None and encoder.num_layers is not None:
        encoder = replace(encoder, num_layers=min(encoder.num_layers, few))
    return replace(model, num_layers=min(model.num_layers, few), encoder=encoder)


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.slow if p.stem in LARGE else (), id=p.stem) for p in CONFIGS]
)
def test_builds_and_steps_once(path):
    """The train step of the config traces, and gives the state back in the shapes it took."""
    config = load(path)
    config = replace(config, model=replace(of_few_layers(config.model), vocab_size=config.model.vocab_size or 4096))
    model = make_model(config.model, config.loss)
    optimizer = make_optimizer(config.optimizer, config.train.steps, model.specs)
    state = state_shapes(model, optimizer)
    after, metrics = jax.eval_shape(
        lambda s, b: train_step(
            s,
            b,
            model=model,
            optimizer=optimizer,
            schedule=make_schedule(config.optimizer, config.train.steps),
            micro_batches=config.execution.gradient_accumulation_steps,
            clip_norm=config.optimizer.clip_norm,
        ),
        state,
        family_of(config.model).batch_spec(config.model, config.data, config.train.global_batch_size),
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert metrics.loss.shape == ()


def test_sizes():
    """The published shapes have the published numbers of parameters (their vocabularies rounded up here)."""
    # GPT-2 has 124,439,808 with 50,257 entries; BERT with both heads 110,106,428 with 30,522.
    sizes = {
        "gpt2_124m.py": 124_439_808 + (50_304 - 50_257) * 768,
        "gpt2_350m.py": 354_823_168 + (50_304 - 50_257) * 1024,
        "gpt2_1_5b.py": 1_557_611_200 + (50_304 - 50_257) * 1600,
        "llama_1b.py": 1_107_363_840,
        "llama_7b.py": 6_738_415_616,
        "llama_70b.py": 68_976_648_192,
        "bert_base.py:512": 110_106_428 + (30_592 - 30_522) * (768 + 1),
        # transformers' LongformerForMaskedLM has 2 more positions and a token type, BigBirdForMaskedLM neither.
        "longformer_base.py": 148_711_257 + (50_304 - 50_265) * (768 + 1) - 3 * 768,
        "bigbird_base.py": 127_520_694 + (50_368 - 50_358) * (768 + 1),
    }
    for name, size in sizes.items():
        config = from_mapping(configs.load(f"configs/{name}"))
        assert count_parameters(config.model).total == size, name


@pytest.mark.parametrize(
    "name, total, active",
    [
        # transformers' MixtralForCausalLM and OlmoeForCausalLM have as many in all, to the last one.
        ("mixtral_8x7b", (46_702_792_704, "46.7e9"), "12.9e9"),
        ("olmoe_1b_7b", (6_919_161_856, "6.9e9"), "1.3e9"),
        ("glam_64b_64e", (None, "1.2e12"), "96.6e9"),
        ("llama_70b_stages", (68_976_648_192, "69e9"), "69e9"),
    ],
)
def test_sizes_of_mixtures(name, total, active):
    """In all and for one token, to the digits that are published."""
    counted = count_parameters(from_mapping(configs.load(f"configs/{name}.py")).model)
    exact, published = total
    assert exact in (None, counted.total)
    for found, digits in ((counted.total, published), (counted.active, active)):
        decimals = len(digits.partition(".")[2].partition("e")[0])
        assert round(found / 10 ** int(digits.partition("e")[2]), decimals) == float(digits.partition("e")[0])


def test_argument():
    assert from_mapping(configs.load("configs/bert_base.py:512")).model.context_length == 512


def test_overrides_by_equals_and_by_space():
    argv = ["--config=configs/gpt_tiny.py", "--config.model.num_layers", "2", "--config.optimizer.clip_norm=none"]
    parsed = parse_config(parser("", "test"), argv)
    assert parsed.config.model.num_layers == 2
    assert parsed.config.optimizer.clip_norm is None
    assert parsed.config.workdir == "runs/gpt_tiny"
    assert parsed.overrides == ["model.num_layers: 4 -> 2", "optimizer.clip_norm: 1.0 -> None"]


def test_a_batch_dimension_is_never_a_parameter():
    """No config's vocabulary is smaller than the tokenizer it asks for."""
    for path in CONFIGS:
        config = load(path)
        if config.model.vocab_size is not None:
            assert config.model.vocab_size >= config.data.tokenizer_vocab, path.name
            assert np.remainder(config.model.vocab_size, 64) == 0


def test_files_whose_names_hold_signs_of_lists_and_globs(tmp_path, monkeypatch, capsys):
    from jaxformer.data.sources import inputs

    names = ["a,b.txt", "(draft).txt", "a[1].txt", "it's.txt", "~tilde.txt"]
    for name in names:
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    given = """"a,b.txt",(draft).txt,a[1].txt,it's.txt,./~tilde.txt"""
    argv = [f"--config={CONFIGS[0].parent}/gpt_tiny.py", f"--config.data.files={given}"]
    parsed = parse_config(parser("", "test"), argv)
    config = replace(parsed.config.data, validation_fraction=0.5)
    assert [each.path.name for each in inputs(config)] == names
    with pytest.raises(SystemExit):
        parse_config(parser("", "test"), ["--help"])
    assert """--config.data.files='"a,b.txt",c'""" in capsys.readouterr().out


def test_a_config_file_in_the_home_folder_and_one_with_a_colon(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.py", "a:b.py"):
        (tmp_path / name).write_text(
            "def get_config(argument=''):\n    return {'data': {'text_field': argument or 'text'}}\n"
        )
    parsed = parse_config(parser("", "test"), ["--config=~/a.py:512", "--config.workdir=~/runs/x"])
    assert (parsed.config.data.text_field, parsed.config.workdir) == ("512", f"{tmp_path}/runs/x")
    assert parse_config(parser("", "test"), ["--config=~/a:b.py"]).config.data.text_field == "text"
