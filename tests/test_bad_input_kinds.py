"""Bad kinds of one's own, old names and wrong guesses of fields; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

from jaxformer import AttentionConfig
from jaxformer.functional.sublayers import MIXERS

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
    for table in (MIXERS, AttentionConfig.registered):
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


# case -> flags of pretrain.
FLAGS = {
    "field under its old and its new name": ["--config.train.batch_rows=4"],
    "section on the command line": ["--config.model.bert=2"],
    "BERT's field under its old name": ["--config.model.token_types=2"],
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
