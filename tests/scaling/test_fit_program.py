"""`python -m experiments.fit`, its figures and the page, end to end."""

import csv
import functools
import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from planted import PUBLISHED, iso_flop, noisy, scattered

from jaxformer.programs import fit as program
from jaxformer.runtime.program import program as run_program
from jaxformer.scaling import bootstrap, figures, fit, plotting, report, run_figures
from jaxformer.scaling.table import Table


def run(*argv):
    """Exit code of the program."""
    with pytest.raises(SystemExit) as end:
        run_program(lambda: program.main([str(word) for word in argv]))
    return end.value.code


def write(path, header, *columns):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(zip(*([f"{value:.8g}" for value in column] for column in columns), strict=True))
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A table like the published one: 240 rows with its coefficients, and five runs that never came down."""
    rng = np.random.default_rng(11)
    n, d = scattered(rng)
    loss = noisy(rng, n, d, noise=0.004)
    n, d = np.append(n, np.geomspace(6e7, 3e8, 5)), np.append(d, np.full(5, 1e9))
    loss = np.append(loss, loss.max() * np.array([1.1, 1.02, 1.05, 1.2, 1.15]))
    order = rng.permutation(len(n))
    path = tmp_path_factory.mktemp("published") / "table.csv"
    return write(path, ["Model Size", "Training FLOP", "loss"], n[order], (6 * n * d)[order], loss[order])


ARGUMENTS = ["--n", "model size", "--c", "training flop", "--loss", "loss"]


@pytest.mark.slow
def test_a_published_table_gives_the_published_coefficients(published, tmp_path, capsys):
    out = tmp_path / "fit"
    command = [
        "--csv",
        str(published),
        *ARGUMENTS,
        "--drop-highest-loss",
        "5",
        "--out",
        str(out),
        "--budget",
        "5.76e23",
    ]
    assert program.main(command) == 0
    result = json.loads((out / "fit.json").read_text())
    for name, (value, stderr) in PUBLISHED.items():
        found = result["parametric"][name]
        assert abs(found["value"] - value) < stderr, name
        assert found["ci95"][0] < found["value"] < found["ci95"][1]
    assert result["settings"]["rows"] == 240 and result["settings"]["derived"] == ["D"]
    assert [row["C"] for row in result["optimal"]["budgets"]] == [5.76e23]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["fit.json"]
        + [f"{name}.{kind}" for kind in ("png", "svg")
           for name in ("loss_compute", "isoflop", "optimum", "residuals", "holdout", "profile")]
    )  # fmt: skip
    text = capsys.readouterr().out
    assert "alpha 0.3" in text and f"wrote {out / 'fit.json'}" in text


@pytest.mark.slow
def test_outliers_are_named_unasked(published, tmp_path, capsys):
    quickly = ["--no-figures", "--bootstrap", "100", "--holdout", "0"]
    assert program.main(["--csv", str(published), *ARGUMENTS, "--out", str(tmp_path / "fit"), *quickly]) == 0
    result = json.loads((tmp_path / "fit" / "fit.json").read_text())
    loss = np.array([float(line.split(",")[2]) for line in published.read_text().splitlines()[1:]])
    highest = set((np.argsort(loss)[-5:] + 1).tolist())
    assert highest <= {outlier["row"] for outlier in result["outliers"]}
    row = result["outliers"][0]["row"]
    assert f"row {row} (line {row + 1})" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "fit").iterdir()] == ["fit.json"]


@pytest.fixture
def small(tmp_path):
    rng = np.random.default_rng(3)
    n, d = iso_flop(sizes=6, budgets=5)
    return write(tmp_path / "small.csv", ["params", "tokens", "nll"], n, d, noisy(rng, n, d))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_file(small, tmp_path):
    common = [
        "--csv",
        str(small),
        "--n",
        "params",
        "--d",
        "tokens",
        "--loss",
        "nll",
        "--no-figures",
        "--bootstrap",
        "150",
    ]
    results = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert program.main([*common, "--out", str(tmp_path / name), "--seed", seed]) == 0
        results.append(json.loads((tmp_path / name / "fit.json").read_text()))
    for result in results:
        del result["settings"]
    assert results[0] == results[1] != results[2]
    assert results[0]["parametric"]["E"]["value"] == results[2]["parametric"]["E"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize("flag, column, law", [
    ("--n", "params", "L(N)"), ("--d", "tokens", "L(D)"),
])  # fmt: skip
def test_one_column_gives_its_power_law(tmp_path, flag, column, law, capsys):
    x = np.geomspace(1e6, 1e9, 10)
    noise = np.exp(0.002 * np.random.default_rng(0).standard_normal(10))
    path = write(tmp_path / "t.csv", [column, "loss"], x, (1.8 + 480 * x**-0.35) * noise)
    assert program.main(["--csv", str(path), flag, column, "--loss", "loss", "--out", str(tmp_path / "o")]) == 0
    result = json.loads((tmp_path / "o" / "fit.json").read_text())
    assert list(result["power_laws"]) == [law] and "parametric" not in result
    assert result["power_laws"][law]["with_floor"]["alpha"]["value"] == pytest.approx(0.35, rel=0.05)
    assert (tmp_path / "o" / f"power_law_{law[2]}.svg").exists()


BAD = [
    (["--n", "parms"], "no column 'parms'; did you mean 'params'? It has 'params', 'tokens', 'nll'"),
    (["--csv", "nowhere.csv"], "nowhere.csv: no such file or directory"),
    (
        ["--loss", "tokens", "--d", "nll", "--drop-highest-loss", "30"],
        "error: --drop-highest-loss: 30; accepted: 0 to 29",
    ),
    (["--drop-highest-loss", "25"], "5 rows; L = E + A / N^alpha + B / D^beta needs at least 8"),
    (["--drop-highest-loss", "29"], ": 1 row; L = E + A / N^alpha + B / D^beta needs at least 8"),
    (["--drop-highest-loss", "x"], "--drop-highest-loss: 'x' is not an integer"),
    (["--budget", "0"], "error: --budget: 0.0; accepted: FLOPs above 0"),
    (["--flops-constant", "0"], "error: --flops-constant: 0.0; accepted: a number above 0"),
    (["--bootstrap", "10"], "--bootstrap: 10; accepted: 100 to 100000"),
    (["--delta", "0"], "error: --delta: 0.0; accepted: a number between 0 and 1"),
    (["--resampling", "jackknife"], "error: --resampling: 'jackknife'; accepted: weights, rows"),
    (["--cluster", "seed"], "no column 'seed'"),
    (["--d", "params"], "N and D rise and fall together"),
    (["--holdout", "-1"], "--holdout: -1; accepted: at least 0"),
    (["--nonsense"], "--nonsense: no such flag"),
    (["--out", "small.csv"], "--out: small.csv is a file"),
]


@pytest.mark.parametrize("changes, says", BAD, ids=[" ".join(changes) for changes, _ in BAD])
def test_bad_input_is_one_line_and_writes_nothing(small, tmp_path, monkeypatch, capsys, changes, says):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--csv", "small.csv", "--n", "params", "--d", "tokens", "--loss", "nll", "--out", "out"]
    assert run(*arguments, *changes) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert captured.err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_parabolas_that_open_downward_are_one_line(tmp_path, capsys):
    c = np.repeat([1e15, 2e15, 4e15], 5)
    n = np.sqrt(c / 120) * np.tile(np.geomspace(0.25, 4, 5), 3)
    path = write(tmp_path / "t.csv", ["n", "c", "loss"], n, c, 4 - 0.1 * np.log(n / np.sqrt(c / 120)) ** 2)
    assert run("--csv", path, "--n", "n", "--c", "c", "--loss", "loss", "--out", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert "opens downward" in error and error.count("\n") == 1 and not (tmp_path / "o").exists()


@pytest.mark.slow
def test_the_program_runs_as_a_module(small, tmp_path):
    module = [sys.executable, "-W", "error", "-m", "experiments.fit"]
    command = [*module, "--csv", str(small), "--n", "params", "--d", "tokens", "--loss", "nll", "--out",
               str(tmp_path / "o"), "--no-figures", "--bootstrap", "100"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    failed = subprocess.run([*module, "--csv", "x"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1


@functools.cache
def fitted():
    rng = np.random.default_rng(4)
    n, d = iso_flop(sizes=6, budgets=5)
    loss = noisy(rng, n, d)
    loss[8] *= 1.08
    table = Table.of(n=n, d=d, loss=loss)
    return table, fit.fit_table(table, fit.Settings(replicates=150))


@pytest.mark.slow
def test_figures_name_their_units_and_differ_without_colour(tmp_path):
    table, result = fitted()
    drawn = figures.draw(table, result)
    for name, figure in drawn.items():
        for axes in figure.axes:
            assert axes.get_ylabel() and (axes.get_xlabel() or name == "loss_compute"), name
    lines = [line for line in drawn["isoflop"].axes[0].get_lines() if line.get_linestyle() != "None"]
    assert len({str(line._dash_pattern) for line in lines}) == len(result["isoflop"]["budgets"]) == 5
    first = [path.read_bytes() for path in plotting.save(drawn, tmp_path)]
    again = [path.read_bytes() for path in plotting.save(figures.draw(table, result), tmp_path)]
    assert first == again  # no dates, no random names


@pytest.mark.slow
def test_figures_of_a_fit_that_pins_nothing_still_draw(tmp_path):
    rng = np.random.default_rng(5)
    n, d = iso_flop(sizes=4, budgets=3, reach=1.5)
    table = Table.of(n=n, d=d, loss=noisy(rng, n, d, noise=0.05))
    result = fit.fit_table(table, fit.Settings(replicates=100))
    assert result["parametric"]["alpha"]["value"] is None
    assert plotting.save(figures.draw(table, result), tmp_path)


def test_a_figure_holds_no_date():
    figure, axes = plotting.panel()
    axes.plot([1, 2], [1, 2])
    svg, pdf = plotting.encoded(figure, "svg"), plotting.encoded(figure, "pdf")
    assert svg == plotting.encoded(figure, "svg") and pdf == plotting.encoded(figure, "pdf")
    assert b"dc:date" not in svg and b"CreationDate" not in pdf


def test_a_power_law_of_a_parameter_that_is_unknown_is_not_drawn():
    unknown = bootstrap.quantity(0.3, np.full(100, np.nan))
    assert unknown["value"] is None and "estimate" not in unknown
    known = {"value": 0.3, "ci95": [0.2, 0.4]}
    law = {"A": known, "alpha": known}
    fitted = {"with_floor": {**law, "E": unknown}, "without_floor": law}
    figure = figures.power_law(Table.of(n=[1e5, 1e6], loss=[3.0, 2.9]), "N", fitted)
    assert [line.get_label()[:3] for line in figure.axes[0].get_lines()] == ["mea", "$A/"]


@pytest.mark.slow
def test_learning_rate_and_training_curves_draw_diverged_runs_too(tmp_path):
    points = [{"N": n, "learning_rate": rate, "loss": 3.0 + rate, "chosen": rate == 1e-3} for n in (1e5, 1e6)
              for rate in (1e-4, 1e-3, 1e-2)] + [{"N": 1e5, "learning_rate": 0.1, "loss": "nan"}]  # fmt: skip
    curves = [
        {"N": 1e5, "tokens": [1e4, 1e5], "loss": [5.0, 4.0]},
        {"N": 1e6, "tokens": [1e4, 1e5], "loss": [5, 3]},
    ]
    drawn = {"lr": run_figures.learning_rate_curves(points), "train": run_figures.training_curves(curves)}
    assert len(plotting.save(drawn, tmp_path)) == 4


class Checker(html.parser.HTMLParser):
    """Collects tags that were not closed in order, and every address."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path):
    table, result = fitted()
    pictures = {name: report.embed(figure) for name, figure in figures.draw(table, result).items()}
    page = report.page(
        "Ladder <&>",
        {"all parameters": result, "without embeddings": result},
        pictures,
        found=[{"finding": "a", "value": "0.5", "95% interval": "[0.4, 0.6]"}],
        lacking=["To determine alpha_N: sizes"],
        tables={"Runs": [{"N": 1e6, "loss": 3.0}]},
        commands=["jaxformer scaling --config=configs/x.py && echo '<done>'"],
        manifest={"versions": {"jax": "0.10"}, "seeds": [0, 1]},
    )
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "script" not in checker.tags and "link" not in checker.tags
    assert len(checker.addresses) == len(pictures)
    assert all(address.startswith("data:image/svg+xml;base64,") for address in checker.addresses)
    assert page.index("<td") < page.index("[0.4, 0.6]") < page.index("To determine") < page.index("<figure")
    assert not re.search(r"https?://", re.sub(r'src="[^"]*"', "", page))
    assert (
        page.count("Ladder &lt;&amp;&gt;") == 2
        and "Ladder <" not in page
        and "&lt;done&gt;" in page
        and "<done>" not in page
    )
    for name in ("E", "A", "B", "alpha", "beta"):
        assert report.interval(result["parametric"][name]) in page
    path = report.write(tmp_path / "new" / "report.html", page)
    assert path.read_text(encoding="utf-8") == page and [p.name for p in path.parent.iterdir()] == ["report.html"]
