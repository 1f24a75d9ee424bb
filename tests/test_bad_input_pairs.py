"""Bad pairs of sequences and bad settings of what hides text; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

__all__ = ["place"]

READS = ["--config.model.family=encoder_decoder", "--config.model.encoder.source_length=32"]
TEXT = "--config.data.files=text.txt"
GOOD = '{"source": "to be", "target": "sein"}\n'

# case -> name of the file, what it holds, further flags
PAIRS = {
    "pair without a target": ("a.jsonl", GOOD + '{"source": "or not"}\n', []),
    "pair with a blank side": ("a.jsonl", GOOD + '{"source": "or not", "target": " "}\n', []),
    "columns without the target's": ("a.tsv", "source\tother\nto be\tsein\n", []),
    "line with too few columns": ("a.tsv", "source\ttarget\nto be\tsein\nor not\n", []),
    "line with too few columns by number": (
        "a.tsv", "to be\tsein\nor not\n", ["--config.data.source_field=1", "--config.data.target_field=2"],
    ),
    "pairs from a file of plain text": ("a.txt", "to be", []),
    "source longer than a row": ("a.jsonl", GOOD + GOOD.replace("to be", "to be or not " * 9) + GOOD * 20, []),
    "target longer than a row": ("a.jsonl", GOOD + GOOD.replace("sein", "sein oder nicht sein") + GOOD * 20, []),
    "all pairs longer than a row": (
        "a.jsonl", GOOD.replace("sein", "sein oder nicht sein") * 20, ["--config.data.long_pairs=skip"],
    ),
    "one pair and nothing held out": ("a.jsonl", GOOD, []),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_pairs(place, case):
    name, content, flags = PAIRS[case]
    (place.folder / name).write_text(content)
    files = f"--config.data.files={place.folder / name}"
    assert place.pretrain(*READS, "--config.data.objective=pairs", files, *flags) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


FLAGS = {
    "encoder-decoder that is to predict the next token": [*READS],
    "pairs of a source that has none": [*READS, "--config.data.objective=pairs", "--config.data.source=stdlib"],
    "source field without a target field": [TEXT, "--config.data.source_field=de"],
    "one text beside a source and a target": [TEXT, "--config.data.objective=pairs", "--config.data.text_field=body"],
    "one field for both sides": [TEXT, "--config.data.source_field=de", "--config.data.target_field=de"],
    "rate of hidden tokens above 1": [
        *READS, "--config.data.objective=span_corruption", "--config.data.span_corruption.noise_rate=1.2",
    ],
    "too few sentinels": [
        *READS, "--config.data.objective=span_corruption", "--config.model.encoder.source_length=512",
        "--config.model.context_length=114", "--config.data.span_corruption.sentinels=20",
    ],
    "too few sentinels for one of several denoisers": [
        *READS, "--config.data.objective=mixture", "--config.data.ul2.sentinels=2",
    ],
    "settings of another objective": ["--config.data.span_corruption.roll=true"],
    "denoising without noise": [
        *READS, "--config.data.objective=denoising", "--config.data.denoising.permute_sentences=false",
        "--config.data.denoising.infilling_rate=0",
    ],
    "mixture of no denoisers": [
        *READS, "--config.data.objective=mixture", "--config.data.ul2.regular=0", "--config.data.ul2.sequential=0",
        "--config.data.ul2.extreme=0",
    ],
    "prefixes from more to less": [
        "--config.data.objective=prefix_lm", "--config.data.prefix_lm.least=0.5", "--config.data.prefix_lm.most=0.4",
    ],
    "rows that hold no text to hide": [
        *READS, "--config.data.objective=span_corruption", "--config.model.context_length=2",
    ],
    "text shorter than a row's": [
        *READS, "--config.data.objective=denoising", "--config.model.encoder.source_length=8000",
        "--config.model.context_length=8000",
    ],
    "shortest source longer than the longest": [
        *READS, "--config.data.objective=pairs", "--config.data.source=transduction",
        "--config.data.language_shortest=41",
    ],
    "more synonyms than signs": [
        *READS, "--config.data.objective=pairs", "--config.data.source=transduction",
        "--config.data.language_synonyms=700",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_settings(place, case, monkeypatch):
    monkeypatch.chdir(place.folder)
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
    assert (place.folder / "cache").exists() == (case == "text shorter than a row's")  # the others read no text


def test_shards_that_hold_no_pairs(place):
    """Pairs are asked of shards of plain text."""
    from jaxformer.config import DataConfig
    from jaxformer.runs import tokenization

    data = DataConfig(files=(str(place.text),), tokenizer="bytes")
    tokenization.tokenize(data, place.folder / "shards", 1, lambda function, items: list(map(function, items)))
    flags = ["--config.data.objective=pairs", f"--config.data.tokens={place.folder / 'shards'}"]
    config = f"--config={place.config}"
    found = place.run("pretrain", config, f"--config.workdir={place.folder / 'run'}", *READS, *flags)
    assert found == (2, expected()["shards that hold no pairs"])
