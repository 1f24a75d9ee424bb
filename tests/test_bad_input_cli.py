"""Bad input of command lines, config files and sizes. The lines stand in bad_input.md."""

import re
from types import SimpleNamespace

import pytest
from bad_input_cases import expected, place
from flat_config import model_config

from jaxformer.data.tokenizers import train as make_tokenizer
from jaxformer.runs import memory_check
from jaxformer.runs import pretrain as jaxformer_main

__all__ = ["place"]

# case -> flags of pretrain.
FLAGS = {
    "too many steps": ["--config.train.steps=3000000000"],
    "a number of 21 digits": ["--config.train.steps=1e20"],
    "a number of more digits than any": ["--config.train.steps=1e99999999999"],
    "a fraction for an integer": ["--config.train.steps=2.5"],
    "a model too wide": ["--config.model.width=1e12"],
    "a window too large": ["--config.model.window=1e20"],
    "a vocabulary too large": ["--config.model.vocab_size=1e12"],
    "a feed-forward layer too wide": ["--config.model.mlp_width=1e14"],
    "too many layers": ["--config.model.num_layers=100000"],
    "too many layers to unroll": ["--config.model.num_layers=10000"],
    "too many rows": ["--config.train.global_batch_size=1e14"],
    "too many steps in a dispatch": ["--config.execution.steps_per_dispatch=1e11"],
    "too large a tokenizer": ["--config.data.tokenizer_vocab=1e23"],
    "too large a rate": ["--config.optimizer.learning_rate=1e300"],
    "a rate that is no number": ["--config.optimizer.learning_rate=nan"],
    "weight decay without end": ["--config.optimizer.weight_decay=inf"],
    "seed too large": ["--config.seed=1e10"],
    "misspelt choice": ["--config.model.positions=rotery"],
    "empty list of files": ["--config.data.files="],
    "empty cache folder": ["--config.data.cache_dir="],
    "empty working directory": ["--config.workdir="],
    "quotation mark left open": ["--config.data.files='a.txt"],
    "home of nobody": ["--config.workdir=~nobody-here/run"],
    "files beside the library's text": ["--config.data.source=stdlib", "--config.data.files=a.txt"],
    "files and a dataset": ["--config.data.files=a.txt", "--config.data.tfds_name=lm1b"],
    "validation files without files": ["--config.data.source=stdlib", "--config.data.validation_files=a.txt"],
    "a language's field without a language": ["--config.data.source=stdlib", "--config.data.language_symbols=4"],
    "the other language's field": ["--config.data.source=markov", "--config.data.language_depth=3"],
    "misspelt flag": ["--newst-step"],
    "misspelt flag of a field": ["--confg.model.width=2"],
    "field without --config": ["--model.width=2"],
    "two configs": ["pretrain"],
    "flag with a value it does not take": ["--newest-step=3"],
}


def test_configs_by_name(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    for case, words in {
        "no config": [],
        "word that is no flag": [str(place.config), "pretrain"],
        "misspelt config": ["gpt_tny"],
        "config by a path of the checkout, elsewhere": ["--config=configs/gpt_tiny.py"],
    }.items():
        assert place.run("pretrain", *words) == (2, expected()[case])
    place.config.write_text("from jaxformer.config import load\n\ndef get_config():\n    return load('gpt_tny')\n")
    assert place.pretrain() == (2, expected()["config that starts from one that is not there"])
    assert place.run("configs", "gpt_tny") == (2, expected()["config to print that is not there"])


@pytest.mark.parametrize("case", FLAGS)
def test_flags(place, monkeypatch, case):
    monkeypatch.chdir(place.folder)
    before = sorted(place.folder.iterdir())
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])
    assert sorted(place.folder.iterdir()) == before  # nothing claimed, no folder named ~ or cache made


# case -> content of the config file; None: no Python file.
CONFIGS = {
    "config file that divides by zero": "def get_config():\n    return {'seed': 1 // 0}\n",
    "config file that imports what is not there": "import no_such_module\n",
    "config file that leaves the program": "import sys\nsys.exit(0)\n",
    "config file that leaves the program later": "import sys\n\ndef get_config():\n    sys.exit(0)\n",
    "config file that holds itself": "def get_config():\n    c = {}\n    c['data'] = c\n    return c\n",
    "config file of a list that holds itself": (
        "def get_config():\n    c = []\n    c.append(c)\n    return {'data': {'files': c}}\n"
    ),
    "config file without end": "def get_config():\n    return get_config()\n",
    "config file that returns nothing": "def get_config():\n    pass\n",
    "config file without get_config": "config = {}\n",
    "config file with a syntax error": "def get_config()\n",
    "config file whose get_config takes no argument": "def get_config():\n    return {}\n",
    "config file with a value left open": (
        "import ml_collections as m\ndef get_config():\n    c = m.ConfigDict()\n"
        "    c.seed = m.config_dict.required_placeholder(int)\n    return c\n"
    ),
    "config file with a wrong type": "def get_config():\n    return {'model': {'width': '64'}}\n",
    "config file with a section that is none": "def get_config():\n    return {'model': 3}\n",
    "config file whose message has lines": "def get_config():\n    raise ValueError('a\\nb')\n",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_files(place, monkeypatch, case):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.chdir(place.folder)
    place.config.write_text(CONFIGS[case])
    argument = ":512" if "no argument" in case else ""
    assert place.run("pretrain", f"--config={place.config}{argument}") == (2, expected()[case])
    assert sorted(path.name for path in place.folder.iterdir()) == ["config.py", "text.txt"]


def test_what_is_no_config_file(place):
    assert place.run("pretrain", f"--config={place.text}") == (2, expected()["config file that is no Python"])
    assert place.run("pretrain", "--config=") == (2, expected()["empty name of a config file"])


def test_debug_shows_the_traceback(place, capsys):
    place.config.write_text(CONFIGS["config file that divides by zero"])
    place.monkeypatch.setattr("sys.argv", ["pretrain.py", f"--config={place.config}", "--debug"])
    from jaxformer.programs import pretrain
    from jaxformer.runtime.program import program

    with pytest.raises(SystemExit) as end:
        program(pretrain.main)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "    return {'seed': 1 // 0}" in lines and "Traceback" in lines[0]
    line = expected()["config file that divides by zero"].replace("DIR", str(place.folder))
    assert lines[-1] == line


# case -> program and its flags; {DIR} is the test's folder.
PROGRAMS = {
    "flag that is needed": ("evaluate",),
    "empty workdir flag": ("evaluate", "--workdir="),
    "misspelt flag of another program": ("evaluate", "--workdirr=x", "--workdir=x"),
    "wrong choice of a flag": ("benchmark", "--suite=trian"),
    "wrong type of a flag": ("benchmark", "--suite=train", "--pairs=many"),
    "flag out of range": ("benchmark", "--suite=train", "--pairs=0"),
    "flag without its value": ("benchmark", "--suite"),
    "samples without end": ("generate", "--workdir=x", "--num-samples=1e12"),
    "no new tokens": ("generate", "--workdir=x", "--max-new-tokens=0"),
    "temperature that is no number": ("generate", "--workdir=x", "--temperature=nan"),
    "beam search with a temperature": ("generate", "--workdir=x", "--beam=2", "--temperature=0.5"),
    "beam search with top-k": ("generate", "--workdir=x", "--beam=2", "--top-k=5"),
    "length penalty without a beam": ("generate", "--workdir=x", "--length-penalty=0.6"),
    "a stream of several prompts": ("generate", "--workdir=x", "--stream", "--prompt=a", "--prompt=b"),
    "fewer beams than samples": ("generate", "--workdir=x", "--beam=2", "--num-samples=3"),
    "seed of another size": ("generate", "--workdir=x", "--seed=-1"),
    "mask choices out of range": ("fill_mask", "--workdir=x", "--text=[MASK]", "--top-k=0"),
    "more devices than there are threads": ("plan", "--config={DIR}/config.py", "--topology=cpu:1000000000"),
    "more chips than there are": ("plan", "--config={DIR}/config.py", "--topology=v5p:99999x99999x99999"),
    "topology that cuts hosts": ("plan", "--config={DIR}/config.py", "--topology=v5e:3x3"),
    "plan into a folder": ("plan", "--config={DIR}/config.py", "--topology=cpu:8", "--json={DIR}"),
    "plan into no folder": ("plan", "--config={DIR}/config.py", "--topology=cpu:8", "--json={DIR}/none/plan.json"),
    "replicates without end": ("scaling", "--config={DIR}/config.py", "--bootstrap=1e12"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs(place, case):
    name, *flags = PROGRAMS[case]
    assert place.run(name, *(flag.replace("{DIR}", str(place.folder)) for flag in flags)) == (2, expected()[case])
    assert sorted(path.name for path in place.folder.iterdir()) == ["config.py", "text.txt"]


def test_figures(place):
    (place.folder / "run").mkdir()
    (place.folder / "run" / "records.jsonl").write_text(
        '{"kind": "train", "step": 1, "time": 0.0, "tokens": 1, "loss": 2.0, "grad_norm": 1.0, '
        '"learning_rate": 1.0, "seconds": 1.0, "skipped": 0}\n'
    )
    for case, out in (
        ("figure of no kind", "curve.foo"),
        ("figure below a file", "text.txt/curve.png"),
    ):
        flags = [f"--workdir={place.folder / 'run'}", f"--out={place.folder / out}"]
        assert place.run("curves", *flags) == (2, expected()[case])


def test_decoding_that_does_not_fit(place, monkeypatch):
    """It was a failed allocation, or the machine's last memory."""
    tokenizer = make_tokenizer("bytes", [], None)
    model = model_config(num_layers=1, width=16, num_heads=2, context_length=16, vocab_size=320, positions="rotary")
    run = jaxformer_main.Run(SimpleNamespace(model=model, compilation_cache=False), {}, tokenizer, 7)
    monkeypatch.setattr(jaxformer_main, "open_run", lambda workdir, mesh: run)
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 2**30)
    for case, flags in (
        ("new tokens that do not fit", ["--max-new-tokens=1000000000"]),
        ("samples that do not fit", ["--num-samples=1e9"]),
        ("beams that do not fit", ["--beam=1e6"]),
    ):
        assert place.run("generate", "--workdir=x", "--prompt=ab", *flags) == (2, expected()[case])


def test_training_that_does_not_fit(place, monkeypatch):
    """Nothing is compiled and nothing claimed; before, a width of 2**20 ended in the kernel's killer."""
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 2**34)
    for case, flags in (
        ("a model that does not fit", ["--config.model.width=1048576"]),
        ("layers that do not fit", ["--config.model.num_layers=10000", "--config.model.layers=scan",
                                    "--config.model.width=128"]),
        ("a batch that does not fit", ["--config.train.global_batch_size=16777216",
                                       "--config.execution.steps_per_dispatch=4"]),
    ):  # fmt: skip
        assert place.pretrain(*flags) == (2, expected()[case])
        assert not (place.folder / "run" / "manifest.json").exists()


@pytest.mark.slow
def test_what_just_fits_is_not_refused(place, monkeypatch):
    model = ["--config.model.width=128", "--config.model.num_heads=2"]
    assert place.pretrain(*model, "--config.train.steps=2", workdir="fits") == (0, "")
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 2**20)
    code, line = place.pretrain(*model, "--config.train.steps=2", workdir="other")
    assert code == 2 and "which has 1 MiB" in line
    assert re.search(r"[\d.]+ MiB for [\d.e+]+ parameters", line)
