"""Bad kinds of one's own, old names and wrong guesses of fields; the lines stand in bad_input.md."""

import sys

import pytest
from bad_input_cases import TINY, expected, place

from jaxformer import AttentionConfig
from jaxformer.config import registry
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models.families import FAMILIES
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser

__all__ = ["place"]

KIND = """from dataclasses import dataclass
from jaxformer import AttentionConfig, Sublayer
from jaxformer.functional.sublayers import MIXERS

@dataclass(frozen=True)
class Own(AttentionConfig, kind="own"):
    %s

def get_config():
    return {"model": {"attention": "own", "positions": "none"}}
"""


@pytest.fixture(autouse=True)
def tables_as_they_were():
    yield
    for table in (MIXERS, AttentionConfig.registered, FAMILIES, OBJECTIVES, registry.FAMILIES, registry.OBJECTIVES):
        dict.pop(table, "own", None)


# case -> body of the class, or a whole config file.
FILES = {
    "kind of one's own without a default": "taps: int",
    "kind of one's own with an unknown annotation": "taps: 'Nothing' = 1",
    "kind of one's own whose check fails": "def _check(self):\n        1 // 0",
    "kind of one's own whose check of the model fails": "def check_model(self, model):\n        return model.nothing",
    "kind of one's own whose summary fails": "def summary(self):\n        return self.nothing",
    "kind named as an implementation": "pass\nclass Fast(AttentionConfig, kind='splash'): pass",
    "kind named as a built-in one": "pass\nclass Softmax(AttentionConfig, kind='softmax'): pass",
    "kind without a name": "pass\nclass Nameless(AttentionConfig, kind=''): pass",
    "entry without a function": "pass\nMIXERS['own'] = Sublayer(None, None, None)",
    "entry whose terms are one text": "pass\nMIXERS |= {'own': MIXERS['softmax']._replace(terms='energy')}",
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_kinds(place, monkeypatch, case):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    place.config.write_text(KIND % FILES[case])
    flags = [f"--config={place.config}", f"--config.workdir={place.folder / 'run'}"]
    assert place.run("pretrain", *flags) == (2, expected()[case])
    assert not (place.folder / "run").exists()


# A whole kind; a case replaces one of its functions, or adds a family or an objective.
WHOLE = """from dataclasses import dataclass
import jax.numpy as jnp, numpy as np
from jaxformer import AttentionConfig, Cost, Sublayer
from jaxformer.config.registry import FamilyTraits, ObjectiveTraits
from jaxformer.data.objectives import OBJECTIVES, Objective, next_token
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models import gpt
from jaxformer.models.families import FAMILIES, Family

@dataclass(frozen=True)
class Own(AttentionConfig, kind="own"):
    pass

CONFIG = {"model": {"attention": "own", "positions": "none"}}
OWN = Sublayer(lambda cfg: {}, lambda params, x, cfg, context: (x, None, {}), lambda cfg, length, execution: Cost())
GPT = Family(FamilyTraits(True, ("next_token",)), gpt.specs, gpt.apply, gpt.loss, gpt.weights)

def asks(change):
    def prepare(tokenizer, data):
        return lambda windows, bits: change(next_token(windows, separator_id=tokenizer.separator_id))
    OBJECTIVES["own"] = Objective(prepare, ahead=1, traits=ObjectiveTraits(families=("gpt",)))
    return {"data": {"objective": "own"}}

def family(**functions):
    FAMILIES["own"] = GPT._replace(**functions)
    return {"model": {"family": "own"}}

%s
MIXERS["own"] = OWN

def get_config():
    return CONFIG
"""
RETURNED = {
    "specs that are none": "OWN = OWN._replace(specs=lambda cfg: {'w': 3})",
    "specs that are a list": "OWN = OWN._replace(specs=lambda cfg: [])",
    "cost that is a number": "OWN = OWN._replace(cost=lambda *_: 3.0)",
    "cost that is not finite": "OWN = OWN._replace(cost=lambda *_: Cost(products=float('nan')))",
    "output alone": "OWN = OWN._replace(apply=lambda params, x, cfg, context: x)",
    "output of another shape": "OWN = OWN._replace(apply=lambda params, x, cfg, context: (x[:, 0], None, {}))",
    "output of another type": (
        "OWN = OWN._replace(apply=lambda params, x, cfg, context: (x.astype('float16'), None, {}))"
    ),
    "terms that were not declared": "OWN = OWN._replace(apply=lambda params, x, *_: (x, None, {'energy': x.sum()}))",
    "terms with axes": (
        "OWN = OWN._replace(apply=lambda params, x, *_: (x, None, {'energy': x}), terms=('energy',))"
    ),
    "term named loss": "OWN = OWN._replace(terms=('loss',))",
    "family whose loss has other names": "CONFIG = family(weights=lambda batch, cfg: {'nll': batch.weights.sum()})",
    "family whose loss is one number": "CONFIG = family(loss=lambda *arguments: 3.0)",
    "family without an accuracy": (
        "CONFIG = family(loss=lambda params, batch, *_: ({'loss': (1.0, 1.0)}, {'loss': (batch.weights, 1.0)}))"
    ),
    "family whose loss is no pair": (
        "CONFIG = family(loss=lambda *_: ({'loss': jnp.zeros(())}, {'loss': (0, 0), 'accuracy': (0, 0)}))"
    ),
    "family whose specs are none": "CONFIG = family(specs=lambda cfg: {'w': (3, 4)})",
    "objective that makes no Batch": "CONFIG = asks(lambda batch: tuple(batch))",
    "objective with inputs that nobody reads": (
        "CONFIG = asks(lambda batch: batch._replace(inputs={'more': batch.tokens}))"
    ),
    "objective with rows of another length": "CONFIG = asks(lambda b: b._replace(weights=b.weights[:, 1:]))",
    "objective with numbers of another type": (
        "CONFIG = asks(lambda batch: batch._replace(targets=batch.targets.astype('int64')))"
    ),
    "objective with ids that are none": "CONFIG = asks(lambda batch: batch._replace(targets=batch.targets - 300))",
    "objective with weights below 0": "CONFIG = asks(lambda batch: batch._replace(weights=-batch.weights))",
    "objective with weights of 0": "CONFIG = asks(lambda batch: batch._replace(weights=batch.weights * 0))",
    "objective with positions below 0": "CONFIG = asks(lambda batch: batch._replace(positions=batch.positions - 1))",
}  # fmt: skip


@pytest.mark.parametrize("case", RETURNED)
def test_what_own_kinds_return(place, monkeypatch, case):
    """It is refused before a manifest is there."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    place.config.write_text(WHOLE % RETURNED[case])
    flags = [f"--config={place.config}", f"--config.workdir={place.folder / 'run'}", *TINY,
             f"--config.data.cache_dir={place.folder / 'cache'}", f"--config.data.files={place.text}"]  # fmt: skip
    flags = [flag for flag in flags if "num_heads" not in flag]
    assert place.run("pretrain", *flags) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
    if "objective" not in case:  # a plan has no batches
        flags = [flag for flag in flags if "data." not in flag]
        assert place.run("plan", *flags, "--topology=cpu:1") == (2, expected()[case])
    sys.modules.pop("config_file_config")


@pytest.mark.slow
def test_a_mixer_that_keeps_nothing(place):
    """Its run proposes no sample, and asking for one is one line, before the memory that a cache needs is counted. When
    its file has changed, whatever goes on with the run says so."""
    place.config.write_text(WHOLE % "")
    flags = [f"--config={place.config}", f"--config.workdir={place.folder / 'run'}", *TINY, "--config.train.steps=1",
             f"--config.data.cache_dir={place.folder / 'cache'}", f"--config.data.files={place.text}"]  # fmt: skip
    pretrain.pretrain(parse_config(parser("", "pretrain"), [flag for flag in flags if "num_heads" not in flag]))
    said = place.capsys.readouterr().out
    assert "\nmeasure: " in said and "generate" not in said
    words = [f"--workdir={place.folder / 'run'}", f"--config={place.config}"]
    assert place.run("generate", *words) == (2, expected()["text from a mixer that keeps nothing"])
    again = [flag for flag in flags if "num_heads" not in flag]
    pretrain.pretrain(parse_config(parser("", "pretrain"), again))
    assert "changed since" not in place.capsys.readouterr().out
    place.config.write_text(WHOLE % "# as before")
    pretrain.pretrain(parse_config(parser("", "pretrain"), again))
    note = "note: config.py changed since this run began; what it computes now may be something else\n"
    assert note in place.capsys.readouterr().out
    evaluation.evaluate(place.folder / "run", cache_dir=str(place.folder / "cache"), log=lambda _: None)
    assert note in place.capsys.readouterr().err
    pretrain.open_run(place.folder / "run")
    assert note in place.capsys.readouterr().err


# case -> flags of pretrain.
FLAGS = {
    "field under its old and its new name": ["--config.train.batch_rows=4"],
    "section on the command line": ["--config.model.bert=2"],
    "BERT's field under its old name": ["--config.model.token_types=2"],
    "field by another library's name": ["--config.model.depth=2"],
    "field by another library's name, in another section": ["--config.train.lr=2"],
    "field of another section": ["--config.model.learning_rate=2"],
    "field of a section inside": ["--config.model.base=2"],
    "choice by another library's name": ["--config.model.positions=RoPE"],
    "choice in capital letters": ["--config.model.norm=RMSNorm"],
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(place, case):
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])


# case -> what get_config returns.
CONFIGS = {
    "an array for a number": "{'model': {'token_types': __import__('numpy').ones(2)}}",
    "a number of 5000 digits below 0": "{'model': {'attention': {'num_heads': -10**5000}}}",
    "a number for a section that an old name is in": "{'model': {'token_types': 2, 'bert': 3}}",
    "null for a section": "{'model': None}",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_values(place, monkeypatch, case):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    place.config.write_text(f"def get_config():\n    return {CONFIGS[case]}\n")
    assert place.pretrain() == (2, expected()[case])
    assert place.run("pretrain", str(place.config)) == (2, expected()[case])


@pytest.mark.parametrize("program", ["generate", "evaluate", "fill_mask"])
def test_programs_that_take_no_fields(place, program):
    line = expected()["field for a program that takes none"]
    for flag in ("--config.model.width=3", "--model.width=3", "--confg.model.width=3"):
        assert place.run(program, "--workdir=x", flag) == (2, line.replace("--config.model.width", flag[:-2]))
