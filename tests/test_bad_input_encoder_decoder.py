"""Bad encoders, sources and files to translate, provoked as a user would meet them; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import Nothing, Place, expected, place
from quick_runs import quickly

__all__ = ["place"]

FAMILY = "--config.model.family=encoder_decoder"
NOISY = "--config.data.objective=denoising"
SOURCE = "--config.model.encoder.source_length=16"

# case -> flags of pretrain
CONFIGS = {
    "encoder-decoder without an encoder": [FAMILY, NOISY],
    "encoder of a decoder-only model": [SOURCE],
    "scale of the scores": ["--config.model.attention.scale=0"],
    "scaled output of a bert": [
        "--config.model.family=bert", "--config.data.objective=masked", "--config.model.scale_output=true",
    ],
    "layers of an encoder": [FAMILY, NOISY, SOURCE, "--config.model.encoder.num_layers=0"],
    "source length under its short name": [FAMILY, NOISY, "--config.model.source_length=0"],
    "source length under both names": [FAMILY, NOISY, SOURCE, "--config.model.source_length=8"],
    "a context axis not cutting the sources": [
        FAMILY, NOISY, "--config.model.encoder.source_length=24", "--config.mesh.data=1", "--config.mesh.context=8",
    ],
    "kernel that cannot do cross attention": [
        FAMILY, NOISY, "--config.model.encoder.source_length=256", "--config.model.context_length=128",
        "--config.execution.attention=splash", "--config.model.head_width=64",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(place, case, monkeypatch):
    if "kernel" in case:
        monkeypatch.setattr("jaxformer.runs.pretrain.check_available", lambda execution: None)
    assert place.pretrain(*CONFIGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


KIND = """from dataclasses import dataclass
from jaxformer import AttentionConfig, Cost, Sublayer
from jaxformer.functional.sublayers import MIXERS

@dataclass(frozen=True)
class Headless(AttentionConfig, kind="headless"):
    pass

def get_config():
    return {"model": {"family": "encoder_decoder", "encoder": {}, "attention": "headless", "positions": "none"},
            "data": {"objective": "denoising"}}
"""


def test_attention_without_heads(place, monkeypatch):
    from jaxformer import AttentionConfig

    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(AttentionConfig, "registered", dict(AttentionConfig.registered))
    place.config.write_text(KIND)
    found = place.run("pretrain", f"--config={place.config}", f"--config.workdir={place.folder / 'run'}")
    assert found == (2, expected()["cross attention without heads"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with finished runs, `pairs` of an encoder-decoder and `text` of a GPT."""
    with quickly() as patch:
        first = Place(tmp_path_factory.mktemp("made"), patch, Nothing())
        (first.folder / "pairs.tsv").write_text("source\ttarget\n" + "ab\tba\nbc\tcb\n" * 60)
        flags = [
            FAMILY,
            SOURCE,
            "--config.data.objective=pairs",
            "--config.train.steps=2",
            "--config.model.num_layers=1",
        ]
        files = f"--config.data.files={first.folder / 'pairs.tsv'}"
        assert first.pretrain(*flags, files, workdir="pairs") == (0, "")
        assert first.pretrain("--config.train.steps=2", workdir="text") == (0, "")
    return first.folder


# case -> program, run, flags; FILES are names of those below
PROGRAMS = {
    "encoder-decoder without a source": ("generate", "pairs", ["--prompt=a"]),
    "source for a decoder-only model": ("generate", "text", ["--source=a"]),
    "two prompts for one source": ("generate", "pairs", ["--source=a", "--prompt=a", "--prompt=b"]),
    "source longer than the encoder's": ("generate", "pairs", ["--source=" + "a" * 16]),
    "translate without the file": ("translate", "pairs", ["--file=NONE", "--output=OUT"]),
    "translate an empty file": ("translate", "pairs", ["--file=EMPTY", "--output=OUT"]),
    "translate bytes that are no text": ("translate", "pairs", ["--file=BYTES", "--output=OUT"]),
    "translate a line that is too long": ("translate", "pairs", ["--file=LONG", "--output=OUT"]),
    "translation that is there": ("translate", "pairs", ["--file=FILE", "--output=FILE"]),
    "translation begun with other beams": ("translate", "pairs", ["--file=FILE", "--output=BEGUN"]),
    "translation begun with nothing that is known": ("translate", "pairs", ["--file=FILE", "--output=LOST"]),
    "translation whose note was damaged": ("translate", "pairs", ["--file=FILE", "--output=LESS"]),
    "translation into no folder": ("translate", "pairs", ["--file=FILE", "--output=NOWHERE/OUT"]),
    "reference without the file": ("translate", "pairs", ["--file=FILE", "--output=OUT", "--reference=NONE"]),
    "translate by a decoder-only model": ("translate", "text", ["--file=FILE", "--output=OUT"]),
    "negative length penalty": ("translate", "pairs", ["--file=FILE", "--output=OUT", "--length-penalty=-1"]),
    "reference of other lines": ("translate", "pairs", ["--file=FILE", "--output=OUT", "--reference=LONG"]),
    "reference without sacrebleu": ("translate", "pairs", ["--file=FILE", "--output=OUT", "--reference=FILE"]),
}  # fmt: skip
FILES = {
    "EMPTY": b"", "BYTES": b"a\n\xff\n", "LONG": b"a\n" + b"a" * 16 + b"\n", "FILE": b"ab\n",
    "BEGUN.partial": b"x\n", "BEGUN.partial.json": b'{"beams": 2}', "LOST.partial": b"x\n",
    "LESS.partial": b"x\n", "LESS.partial.json": b"[1]",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", PROGRAMS)
def test_programs(place, made, case, monkeypatch):
    program, run, flags = PROGRAMS[case]
    if "sacrebleu" in case:
        monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    elif "reference" in case:
        pytest.importorskip("sacrebleu")
    for name, content in FILES.items():
        (place.folder / name).write_bytes(content)
    flags = [f"{flag.split('=')[0]}={place.folder / value}" if (value := flag.partition("=")[2]).isupper() else flag
             for flag in flags]  # fmt: skip
    before = {path.name: path.read_bytes() for path in place.folder.iterdir() if path.is_file()}
    code, line = place.run(program, f"--workdir={made / run}", *flags)
    line = line.replace(str(made), "MADE")
    if "begun with other beams" in case:
        line = "".join(line.partition("beams: 2 -> 4")[:2])  # and whatever else differs
    assert (code, line) == (2, expected()[case])
    assert {path.name: path.read_bytes() for path in place.folder.iterdir() if path.is_file()} == before
