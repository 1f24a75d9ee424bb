"""`jaxformer compare`, small: a baseline and a variant on one ladder, rows kept, three lines and a page; kills."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from quick_runs import one_device

from experiments.simulated_ladders import ladder, truths
from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.programs import compare
from jaxformer.runs import comparing, scaling_study
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.scaling.ladder import StudyConfig, size_model
from jaxformer.training.sweep import trial
from jaxformer.training.sweep.trial import SweepSeconds

CONFIG = """
def get_config():
    config = {
        "model": {"context_length": 16, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 500_000},
        "optimizer": {"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2},
        "train": {"global_batch_size": 8, "eval_rows": 32},
        "execution": {"steps_per_dispatch": 5},
        "ladder": {"widths": (8, 16, 24), "head_width": 8, "min_layers": 1, "min_steps": 5,
                   "budgets": (4e7, 8e7, 1.6e8),
                   "max_tokens_per_parameter": 1e4, "min_tokens_per_parameter": 0.01,
                   "learning_rates": (1.0,)},
        "variants": VARIANTS,
    }
    config["data"].update(DATA)
    return config
"""


def config(folder, variants, data=()):
    (folder / "ladder.py").write_text(CONFIG.replace("VARIANTS", repr(variants)).replace("DATA", repr(dict(data))))
    return [f"--config={folder / 'ladder.py'}", f"--config.workdir={folder / 'study'}",
            f"--config.data.cache_dir={folder / 'cache'}"]  # fmt: skip


def entrants(folder, variants, *flags, data=()):
    given = [*config(folder, variants, data), *flags]
    return comparing.entrants(parse_config(parser("", "compare"), given, StudyConfig, beside=("variants",)))


def test_variants_differ_in_what_they_change(tmp_path):
    variants = {"slow": {"optimizer.learning_rate": 1e-3}, "wide": {"model.mlp_width": 64, "seed": 3}}
    base, slow, wide = entrants(tmp_path, variants, "--config.optimizer.weight_decay=0.3")
    assert [each.config.workdir for each in (base, slow)] == [str(tmp_path / "study" / n) for n in ("baseline", "slow")]
    assert base.config.optimizer.learning_rate == 1e-2 and slow.config.optimizer.learning_rate == 1e-3
    assert wide.config.model.feed_forward.width == 64 and wide.config.seed == 3
    assert {each.config.optimizer.weight_decay for each in (base, slow, wide)} == {0.3}
    assert len({each.config.ladder for each in (base, slow, wide)}) == 1
    assert slow.overrides[-1] == "optimizer.learning_rate: 0.01 -> 0.001"


def test_depth_and_heads_of_a_width_may_differ(tmp_path):
    shapes = {"deep": {"ladder.min_layers": 3}, "thin_heads": {"ladder.head_width": 4}}
    base, deep, thin = entrants(tmp_path, shapes)
    sizes = [size_model(each.config.model, 16, each.config.ladder) for each in (base, deep, thin)]
    assert [(each.num_layers, each.attention.num_heads) for each in sizes] == [(1, 2), (3, 2), (1, 4)]
    assert deep.overrides[-1] == "ladder.min_layers: 1 -> 3" and base.config.ladder.min_layers == 1
    with pytest.raises(ConfigError, match=r"config.variants.a: ladder.budgets is shared by all"):
        entrants(tmp_path, {"a": {"ladder.budgets": (1e7, 2e7)}})


FORM = {
    "model.family": "encoder_decoder", "model.context_length": 8, "model.encoder.source_length": 8,
    "data.objective": "pairs", "data.source_field": "s", "data.target_field": "t",
    "data.text_field": "text", "data.labelled": None,
}  # fmt: skip


def pairs(folder):
    """Writes pairs of 5 to 7 and of 4 to 6 bytes, and returns `data` of a comparison of instructions."""
    for name, start in (("train", 0), ("held", 1)):
        lines = [{"s": "abcdefg"[: 5 + n % 3], "t": "ABCDEF"[: 4 + n % 3]} for n in range(start, start + 40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "source": "files", "files": str(folder / "train.jsonl"), "validation_files": str(folder / "held.jsonl"),
        "tokenizer": "bytes", "objective": "instructions", "text_field": "s",
        "labelled": {"label_field": "t", "template": "{content}"},
    }  # fmt: skip


def test_a_variant_may_predict_the_same_targets_in_another_form(tmp_path):
    base, other = entrants(tmp_path, {"a": FORM}, data=pairs(tmp_path))
    assert (base.config.source_length, other.config.source_length) == (None, 8)
    assert "data.objective: 'instructions' -> 'pairs'" in other.overrides
    memory = {"model.family": "transformer_xl", "model.positions": "relative", "model.memory": 8,
              "data.objective": "segment_recurrence"}  # fmt: skip
    assert entrants(tmp_path, {"a": memory})[1].config.data.objective == "segment_recurrence"
    shared = "config.variants.a: {} is shared by all; accepted: fields of model and optimizer"
    with pytest.raises(ConfigError, match=shared.format("model.context_length")):
        entrants(tmp_path, {"a": memory | {"model.context_length": 8}})
    text = {key: value for key, value in FORM.items() if key != "data.objective"}
    with pytest.raises(ConfigError, match=shared.format("model.context_length")):
        entrants(tmp_path, {"a": text}, data=pairs(tmp_path))
    line = "a: data.objective 'pairs'; accepted beside a baseline of next_token: segment_recurrence"
    with pytest.raises(ConfigError, match=line):
        entrants(tmp_path, {"a": FORM})
    with pytest.raises(ConfigError, match=shared.format("data.files")):
        entrants(tmp_path, {"a": FORM | {"data.files": "other.jsonl"}}, data=pairs(tmp_path))


def test_held_out_rows_of_two_forms_ask_for_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_study, "print_plan", lambda *_, **__: None)
    given = "--config.ladder.max_epochs=1e9", "--config.ladder.min_steps=1"

    def plan(form, data=()):
        return comparing.plan(entrants(tmp_path, {"a": form}, *given, data=data), None, False, print)

    one, other = (comparing._targets(study) for study in plan(FORM, pairs(tmp_path)))
    assert one == other and len(one) == 40 and {row[0] for row in one} == {5, 6, 7}  # the end token is one
    memory = {"model.family": "transformer_xl", "model.positions": "relative", "model.memory": 8,
              "data.objective": "segment_recurrence"}  # fmt: skip
    one, other = (comparing._targets(study) for study in plan(memory))
    assert one == other and len(one) > 100 and {row[0] for row in one[:-1]} == {16}
    data = pairs(tmp_path)
    said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "ABCXYZ"}]  # read where there are any
    lines = (tmp_path / "held.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"messages": said})
    (tmp_path / "held.jsonl").write_text("\n".join(lines) + "\n")
    line = (
        "a.data.objective: with pairs held-out row 3 asks for other tokens than with instructions; accepted: one data"
    )
    with pytest.raises(ConfigError, match=line):
        plan(FORM, data)
    every = entrants(tmp_path, {"a": FORM}, *given, data=data)
    with pytest.raises(ConfigError, match=line):  # without its ladder too
        comparing.plan(comparing.chosen(every, "a"), None, False, print, baseline=every[0])


@pytest.mark.parametrize("name", ["compare_tiny", "compare_ablations", "compare_mechanisms", "compare_pairs"])
def test_every_size_of_every_shipped_variant_can_be_built(name, tmp_path):
    (tmp_path / "text.txt").write_text("text")
    flags = [name, "--config.model.vocab_size=1024", f"--config.workdir={tmp_path / 'study'}"]
    flags += [] if name == "compare_tiny" else [f"--config.data.files={tmp_path / 'text.txt'}"]
    found = comparing.entrants(parse_config(parser("", "compare"), flags, StudyConfig, beside=("variants",)))
    assert len({each.name for each in found}) == len(found) > 1
    for each in found:
        config = each.config
        models = [size_model(config.model, width, config.ladder) for width in config.ladder.widths]
        sizes = [count_parameters(model).active for model in models]
        most = 15 if config.source_length is None else 20  # FLOP are of a target; to each come two of the source
        flops = [training_flops(model, config.data) / size for model, size in zip(models, sizes, strict=True)]
        assert sizes == sorted(set(sizes)) and all(4 < ratio < most for ratio in flops), (each.name, sizes, flops)


def simulated(study, m):
    """Writes the records of a ladder that is worth `m`, as if `study` had trained it."""
    rng = np.random.default_rng(study.config.seed)
    found = ladder(truths()["the sum"], m, 1.0, rng, 0.2 * np.random.default_rng(9).standard_normal(32))
    more = {"step": 100, "branched_at": 80, "params_non_embedding": 1, "seconds": 1.0}
    lines = [
        {**each, **more, "trunk": each["run"], **{k: int(each[k]) for k in ("tokens", "params")}} for each in found
    ]
    records.write(Path(study.config.workdir) / "records.jsonl", lines)


@pytest.mark.slow
def test_a_comparison_from_plan_to_page(tmp_path, monkeypatch, capsys):
    """Training aside, which is `scaling`'s own (tests/runs/test_scaling_study.py)."""
    one_device(monkeypatch)
    monkeypatch.setattr(compare, "a_device_for_each_core", lambda: None)
    monkeypatch.setattr(scaling_study, "product_speed", lambda config: 1e10)
    flags = config(tmp_path, {"other_seeds": {"seed": 7}, "better": {"optimizer.beta2": 0.9}})

    def said(*more):
        monkeypatch.setattr(sys, "argv", ["jaxformer compare", *flags, "--bootstrap=100", *more])
        return compare.main(), capsys.readouterr().out

    code, out = said("--stage=plan")
    assert code == 0 and "== other_seeds: seed=7" in out and out.count("9 runs on 3 trunks") == 3
    asked = []
    monkeypatch.setattr(trial, "estimate", lambda todo, _, *, at_once: asked.append(at_once) or SweepSeconds(5, 120, 7))
    code, out = said("--stage=plan", "--trial", "--at-once=2")
    assert code == 0 and asked == [2] * 3 and out.count("from a few updates of each size: updates 2 min") == 3
    with pytest.raises(ConfigError, match=r"no run of baseline, other_seeds, better has finished; --stage=run trains"):
        said("--stage=report")
    worth = {"baseline": 1.0, "other_seeds": 1.0, "better": 1.6}
    trained = []

    def run(study, *_, **__):
        trained.append(Path(study.config.workdir).name)
        simulated(study, worth[trained[-1]])

    monkeypatch.setattr(scaling_study, "run", run)
    code, out = said()
    assert code == 0 and trained == list(worth)
    last = out.splitlines()[-6:]
    assert last[0] == "other_seeds (seed=7): no difference seen" and last[3] == "better (optimizer.beta2=0.9): saves"
    study = tmp_path / "study"
    numbers = json.loads((study / "comparison.json").read_text())["better"]
    assert numbers["paired"] and len(numbers["budgets"]) == 5
    assert numbers["flop"]["ci95"][0] < 1.6 < numbers["flop"]["ci95"][1]
    page = (study / "comparison.html").read_text()
    assert all(text in page for text in ("What each variant is worth", "What was tuned", "jaxformer compare --config="))
    assert page.count("<img") == 3
    assert said("--stage=report")[1].splitlines()[-6:] == last
    trained.clear()
    code, out = said("--only=better")
    assert code == 0 and trained == ["better"] and "== other_seeds" not in out and ": saves" not in out


FEW = {"widths": "8,16", "budgets": "4e7,4e8", "learning_rates": "1.0,2.0", "learning_rate_extensions": "0"}


@pytest.mark.slow
def test_kills_change_nothing(tmp_path):
    """Killed in the baseline and in the variant, a comparison goes on to the records of one that was not."""
    flags = config(tmp_path, {"learned": {"model.positions": "learned"}})

    def start(study):
        few = [*flags, *(f"--config.ladder.{name}={text}" for name, text in FEW.items())]
        own = [f"--config.workdir={study}", "--stage=run", "--at-once=1"]
        return subprocess.Popen(
            [sys.executable, "-m", "jaxformer", "compare", *few, *own], env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def to_the_end(study):
        process = start(study)
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out[-2000:]
        found = {each: records.load(study / each / "records.jsonl", more=records.STUDY) for each in names}
        return {name: [{k: v for k, v in r.items() if k != "seconds"} for r in mine] for name, mine in found.items()}

    names = "baseline", "learned"
    whole = to_the_end(tmp_path / "whole")
    assert all(sum(each["kind"] == "final" for each in mine) >= 4 for mine in whole.values())
    for name, runs in zip(names, (2, 1), strict=True):  # so many runs of it had finished
        process = start(tmp_path / "killed")
        folder = tmp_path / "killed" / name / "runs"
        while process.poll() is None and not (folder.exists() and len(list(folder.glob("*.jsonl"))) >= runs):
            time.sleep(0.02)
        process.kill()
        out, _ = process.communicate()
        assert process.returncode == -9, f"over before it was killed: {out[-2000:]}"
    assert to_the_end(tmp_path / "killed") == whole
