"""Comparisons that cannot be: one line before anything is trained, and nothing written."""

import pytest
from bad_input_cases import expected, place
from quick_runs import one_device

from jaxformer import records
from jaxformer.programs import compare

__all__ = ["place"]

LADDER = {
    "data": {"source": "markov", "language_symbols": 16, "language_tokens": 100_000},
    "model": {"context_length": 16, "positions": "rotary"},
    "ladder": {"widths": (8, 16), "head_width": 8, "tokens": (512,)},
}


def said(place, variants, *flags, **sections):
    config = LADDER | sections if variants is None else {**LADDER, **sections, "variants": variants}
    place.config.write_text(f"def get_config():\n    return {config!r}\n")
    where = [f"--config.workdir={place.folder / 'study'}", f"--config.data.cache_dir={place.folder / 'cache'}"]
    return place.run("compare", f"--config={place.config}", *where, "--config.optimizer.weight_decay=0.3", *flags)


@pytest.mark.parametrize(("case", "variants"), [
    ("comparison without variants", None),
    ("comparison with a variant of nothing", {"a": {}}),
    ("comparison with a variant named as the baseline", {"baseline": {"seed": 1}}),
    ("comparison with a variant that no folder can have", {"a/b": {"seed": 1}}),
    ("comparison with a variant beside its folder", {"..": {"seed": 1}}),
    ("comparison with a variant without a name", {"": {"seed": 1}}),
    ("comparison with a variant named as a file of it", {"comparison.json": {"seed": 1}}),
    ("comparison with a variant of other text", {"a": {"data.seed": 1}}),
    ("comparison with a variant of what the ladder sets", {"a": {"model.num_heads": 2}}),
    ("comparison with a variant misspelt", {"a": {"model.widht": 2}}),
    ("comparison with a variant out of range", {"a": {"model.dropout": 2}}),
    ("comparison with a variant given on the command line", {"a": {"optimizer.weight_decay": 0}}),
    ("comparison with trained weights", {"a": {"init_from": "runs/a"}}),
    ("comparison with a teacher", {"a": {"distill.teacher": "runs/a"}}),
])  # fmt: skip
def test_variants(place, monkeypatch, case, variants):
    one_device(monkeypatch)
    monkeypatch.setattr(compare, "a_device_for_each_core", lambda: None)
    assert said(place, variants) == (2, expected()[case])
    assert not (place.folder / "study").exists()


def test_a_variant_that_the_sizes_of_the_ladder_cannot_have(place, monkeypatch):
    one_device(monkeypatch)
    monkeypatch.setattr(compare, "a_device_for_each_core", lambda: None)
    given = ("--stage=plan", "--config.optimizer.warmup_steps=0")
    found = said(place, {"a": {"model.parametrization": "mup"}}, *given)
    assert found == (2, expected()["comparison with a variant of a base above the sizes"])


FORM = {
    "model.family": "encoder_decoder", "model.context_length": 8, "model.encoder.source_length": 8,
    "data.objective": "pairs", "data.source_field": "s", "data.target_field": "t", "data.text_field": "text",
    "data.labelled": None,
}  # fmt: skip


@pytest.mark.parametrize(("case", "form", "more"), [
    ("comparison with a variant of another task", {"data.objective": "masked"}, {}),
    ("comparison with a variant of other fields", FORM | {"data.source_field": "t", "data.target_field": "s"}, {}),
    ("comparison with a variant of longer pairs", FORM | {"model.encoder.source_length": 16}, {}),
    ("comparison of pairs in two forms with lines left out", FORM, {"on_error": "skip"}),
    ("comparison of pairs in two forms with some alone", FORM, {"max_examples": 2}),
    ("comparison with a variant of the same pairs in other rows", FORM, {}),
])  # fmt: skip
def test_a_variant_of_the_same_pairs_in_another_form(place, monkeypatch, case, form, more):
    one_device(monkeypatch)
    monkeypatch.setattr(compare, "a_device_for_each_core", lambda: None)
    paths = [place.folder / f"{name}.jsonl" for name in ("train", "held")]
    said_too = ', "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    for path in paths:
        path.write_text('{"s": "abcdef", "t": "ABCDEF"%s}\n' % (said_too if path == paths[1] else "") * 4)
    data = {"source": "files", "files": str(paths[0]), "validation_files": str(paths[1]), "tokenizer": "bytes",
            "objective": "instructions", "text_field": "s", "on_error": more.get("on_error", "stop"),
            "labelled": {"label_field": "t", "template": "{content}",
                         "max_examples": more.get("max_examples")}}  # fmt: skip
    given = ("--stage=plan", "--config.optimizer.warmup_steps=0", "--config.ladder.max_epochs=1e9")
    assert said(place, {"a": form}, *given, data=data) == (2, expected()[case])
    assert not any(path.is_file() for path in (place.folder / "study").rglob("*"))


def test_a_report_of_nothing(place):
    assert said(place, {"a": {"seed": 1}}, "--stage=report") == (2, expected()["report of no comparison"])


def test_ladders_that_are_not_there_or_not_trained(place):
    wanted = expected()["comparison of an unknown ladder alone"]
    assert said(place, {"a": {"seed": 1}}, "--only=baseline,b") == (2, wanted)
    assert said(place, {"a": {"seed": 1}}, "--only=") == (2, wanted.replace("'b'", "''"))
    wanted = expected()["report of one ladder alone"]
    assert said(place, {"a": {"seed": 1}}, "--only=a", "--stage=report") == (2, wanted)
    assert not (place.folder / "study").exists()


def test_a_trial_of_what_is_trained_anyway(place):
    wanted = (2, expected()["trial of a comparison that is trained"])
    assert said(place, {"a": {"seed": 1}}, "--trial") == wanted
    assert said(place, {"a": {"seed": 1}}, "--trial", "--stage=run") == wanted
    assert not (place.folder / "study").exists()


def test_ladders_that_cannot_be_compared(place):
    def write(name, **more):
        final = {"kind": "final", "step": 1, "tokens": 10, "loss": 3.0, "loss_stderr": 0.1, "params": 5, "flops": 1e9,
                 "params_non_embedding": 5, "run": "w8", "trunk": "t", "role": "ladder", "status": "finished",
                 "seed": 0, "width": 8, "learning_rate": 0.1, "branched_at": 0}  # fmt: skip
        (place.folder / "study" / name).mkdir(parents=True, exist_ok=True)
        lines = [{**final, **more, "run": f"w{i}", "params": i + 1, "flops": f} for f in (1e9, 4e9) for i in range(4)]
        records.write(place.folder / "study" / name / "records.jsonl", lines)

    for case, more in (
        ("comparison of diverged runs", {"status": "diverged"}),
        ("comparison of two budgets", {}),
        ("comparison of a run without a loss", {"loss": float("nan")}),
        ("comparison of damaged rows", {"row_losses": "no"}),
    ):
        write("baseline", **more)
        write("a", **more)
        assert said(place, {"a": {"seed": 1}}, "--stage=report") == (2, expected()[case])


def test_sizes_of_a_study(place):
    place.config.write_text(
        f"def get_config():\n    return {LADDER | {'ladder': {**LADDER['ladder'], 'widths': (8, 16, 24)}}!r}\n"
    )

    def said(*flags):
        where = [f"--config.workdir={place.folder / 'study'}", f"--config.data.cache_dir={place.folder / 'cache'}"]
        return place.run("scaling", f"--config={place.config}", *where, *flags)

    assert said("--stage=run", "--only=8;16") == (2, expected()["sizes of a study, in another form"])
    assert said("--stage=plan", "--only=8,9") == (2, expected()["size that a study has not"])
    few = "--config.ladder.searched_sizes=1"
    assert said(few, "--stage=run", "--only=24") == (2, expected()["size without the one that its rate is of"])
    assert said("--only=8") == (2, expected()["report of some sizes alone"])
