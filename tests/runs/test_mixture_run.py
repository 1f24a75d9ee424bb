"""A run on a mixture, from its config by name to its curves; and what may change when it goes on."""

import json
import math
import shutil

import pytest
from quick_runs import quickly

from jaxformer import records
from jaxformer.data import languages
from jaxformer.errors import ConfigError
from jaxformer.programs import curves
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser

SHORT = [
    "--config.train.steps=20", "--config.train.eval_every_steps=10", "--config.train.eval_rows=32",
    "--config.optimizer.warmup_steps=2", "--config.model.num_layers=1", "--config.model.width=32",
    "--config.data.mixture.chain.language_tokens=20_000", "--config.data.mixture.rules.language_tokens=2_000",
    "--config.compilation_cache=false",
]  # fmt: skip


def run(workdir, *flags, config="gpt_mixture", log=None):
    given = [f"--config={config}", f"--config.workdir={workdir}", *flags]
    return pretrain.pretrain(parse_config(parser("", "test"), given))


@pytest.fixture(scope="module", autouse=True)
def on_one_device():
    with quickly():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    flags = [*SHORT, f"--config.data.cache_dir={folder / 'cache'}"]
    return folder / "run", run(folder / "run", *flags), flags


@pytest.mark.slow
def test_what_is_held_out_of_each_source_is_on_record(finished):
    workdir, result, _ = finished
    found = records.load(workdir / "records.jsonl")
    by = {(r["step"], r["split"]): r for r in found if r["kind"] == "eval"}
    assert {split for _, split in by} == {"validation", "validation/chain", "validation/rules"}
    for step in (10, 20):
        chain, rules, whole = (by[step, f"validation{name}"] for name in ("/chain", "/rules", ""))
        assert whole["loss"] == pytest.approx(0.7 * chain["loss"] + 0.3 * rules["loss"], rel=1e-12)
        assert whole["loss_stderr"] == pytest.approx(math.hypot(0.7 * chain["loss_stderr"], 0.3 * rules["loss_stderr"]))
        assert whole["weight"] == chain["weight"] + rules["weight"]
    # On the way 16 rows of each, of which one has only 4; at the end all.
    assert [by[10, f"validation{name}"]["rows"] for name in ("", "/chain", "/rules")] == [20, 16, 4]
    assert by[20, "validation/chain"]["rows"] > 16
    assert by[20, "validation/chain"]["loss"] == result.sources["chain"]["loss"]
    assert found[-1]["kind"] == "final" and found[-1]["loss"] == by[20, "validation"]["loss"]
    config = pretrain.manifest.read_config(workdir)
    assert found[-1]["floor"] == languages.floor(config.data, config.model.context_length).nats < found[-1]["loss"]


@pytest.mark.slow
def test_what_it_says(finished, capsys, tmp_path):
    workdir, _, flags = finished
    shutil.copytree(workdir, tmp_path / "run")
    run(tmp_path / "run", *flags)
    said = capsys.readouterr().out
    assert "chain 70 % (0.72 epochs), rules 30 % (3.00 epochs)" in said
    assert "note: rules runs dry after step 6 and is read again, 3.00 times in all, each time in a fresh order" in said
    assert "held out of chain: loss " in said and "held out of rules: loss " in said


@pytest.mark.slow
def test_it_is_evaluated_and_sampled(finished, tmp_path):
    workdir, result, _ = finished
    said = []
    found = evaluation.evaluate(workdir, cache_dir=str(workdir.parent / "cache"), log=said.append)
    assert found["sources"].keys() == {"chain", "rules"}
    for name, values in found["sources"].items():
        assert values["loss"] == pytest.approx(result.sources[name]["loss"], rel=1e-5)
    assert found["loss"] == pytest.approx(result.evaluation["loss"], rel=1e-5)
    assert [line for line in said if line.startswith("held out of rules: ")] and records.as_json(found)
    assert pretrain.open_run(workdir).tokenizer.encode("!!").size == 2


@pytest.mark.slow
def test_its_curves(finished, tmp_path, monkeypatch):
    workdir, result, _ = finished
    monkeypatch.setattr("sys.argv", ["curves", f"--workdir={workdir}", f"--out={tmp_path / 'c.svg'}"])
    drawn, encoded = [], curves.plotting.encoded

    def kept(figure, *arguments, **more):
        drawn.append(figure)
        return encoded(figure, *arguments, **more)

    monkeypatch.setattr(curves.plotting, "encoded", kept)
    curves.main()
    (axes,) = drawn[0].axes
    lines = {c.get_label().split(" (")[0].split(", ")[1]: c.lines[0].get_ydata() for c in axes.containers}
    assert list(lines) == ["validation", "validation/chain", "validation/rules"]
    markers = {container.lines[0].get_marker() for container in axes.containers}
    assert len(markers) == 3  # one point each can be told apart
    for name, values in result.sources.items():
        assert lines[f"validation/{name}"][-1] == pytest.approx(values["bits_per_byte"])
    assert lines["validation"][-1] == pytest.approx(result.evaluation["bits_per_byte"])
    assert (tmp_path / "c.svg").stat().st_size > 10_000


@pytest.mark.slow
def test_what_may_change_when_it_goes_on(tmp_path):
    """The order and the place of the texts; not a name, nor a weight."""
    for name, words in {"code": "def f(x): return x |", "prose": "All happy families are alike. |"}.items():
        (tmp_path / f"{name}.txt").write_text(words * 100)
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "prose.txt", tmp_path / "moved" / "prose.txt")

    def config(code, prose, weight=2):
        entries = {
            code: {"files": str(tmp_path / "code.txt"), "separator": "|", "weight": weight},
            "prose": {"files": str(tmp_path / prose), "separator": "|"},
        }
        (tmp_path / "c.py").write_text(f"def get_config():\n    return {{'data': {{'mixture': {entries!r}}}}}\n")
        return str(tmp_path / "c.py")

    flags = [*(flag for flag in SHORT if ".mixture." not in flag), "--config.data.tokenizer=bytes"]
    flags += ["--config.model.context_length=16", f"--config.data.cache_dir={tmp_path / 'cache'}"]
    run(tmp_path / "run", *flags, config=config("code", "prose.txt"))
    before = records.load(tmp_path / "run" / "records.jsonl")[-1]
    run(tmp_path / "run", *flags, config=config("code", "moved/prose.txt"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["changes"][0]["changed"][0].startswith("data.mixture.prose.files: ")
    assert records.load(tmp_path / "run" / "records.jsonl")[-1]["loss"] == before["loss"]
    with pytest.raises(ConfigError, match=r"data.mixture.program.weight: 1.0 -> 2.0") as refused:
        run(tmp_path / "run", *flags, config=config("program", "prose.txt"))
    assert ".files:" not in str(refused.value)  # they may change, so they are not what stands in the way
    with pytest.raises(ConfigError, match=r"data.mixture.code.weight: 2.0 -> 3.0"):
        run(tmp_path / "run", *flags, config=config("code", "prose.txt", 3))
