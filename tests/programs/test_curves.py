"""The figure of `jaxformer curves`: one axis, one unit, and all of every run on it."""

import json

import matplotlib.figure
import pytest

from jaxformer.errors import ConfigError
from jaxformer.programs import curves


def write(folder, losses, bits=None):
    """A run's records: an evaluation of each loss; `bits` for each nat."""
    folder.mkdir()
    lines = []
    for step, loss in enumerate(losses, 1):
        about = {"version": 1, "step": step, "tokens": 100 * step, "time": 0.0}
        extra = {} if bits is None else {"bits_per_byte": bits * loss}
        lines.append({"kind": "eval", **about, "loss": loss, "loss_stderr": 0.0, "split": "validation", **extra})
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--workdir={folder}"


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws runs; the axes."""
    monkeypatch.setattr(
        curves.records, "load", lambda path: [json.loads(line) for line in path.read_text().splitlines()]
    )

    def draw(*flags):
        figures = []
        save = matplotlib.figure.Figure.savefig
        keep = lambda figure, *rest, **more: (figures.append(figure), save(figure, *rest, **more))  # noqa: E731
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
        monkeypatch.setattr("sys.argv", ["curves", *flags, f"--out={tmp_path / 'c.svg'}"])
        curves.main()
        return figures[-1].axes[0]

    return draw


def values(axes):
    return [list(container[0].get_ydata()) for container in axes.containers]


def test_bits_per_byte_only_where_all_runs_have_them(tmp_path, drawn):
    coded = write(tmp_path / "coded", [3.0, 2.0], bits=0.5)
    plain = write(tmp_path / "plain", [4.0, 3.0])
    axes = drawn(coded)
    assert axes.get_ylabel() == "loss, bits per byte" and values(axes) == [[1.5, 1.0]]
    axes = drawn(coded, plain)
    assert axes.get_ylabel() == "loss, nats per token" and values(axes) == [[3.0, 2.0], [4.0, 3.0]]


def test_flags_may_stand_between_runs(tmp_path, drawn):
    runs = [write(tmp_path / name, losses).removeprefix("--workdir=") for name, losses in (("a", [3.0]), ("b", [2.0]))]
    axes = drawn(runs[0], "--label=first", runs[1], "--label=second")
    assert values(axes) == [[3.0], [2.0]]
    assert {text.get_text().split(",")[0] for text in axes.get_legend().get_texts()} == {"first", "second"}


def test_every_run_is_inside_the_axes(tmp_path, drawn):
    axes = drawn(write(tmp_path / "bad", [9.0, 8.0]), write(tmp_path / "good", [2.0, 1.0]))
    assert axes.get_ylim()[1] > 9.0


def test_the_same_runs_make_the_same_file(tmp_path, drawn):
    """No date in it: a committed figure changes only where its records do."""
    run = write(tmp_path / "run", [3.0, 2.0])
    drawn(run)
    first = (tmp_path / "c.svg").read_bytes()
    drawn(run)
    assert (tmp_path / "c.svg").read_bytes() == first and b"<dc:date>" not in first


def test_a_number_of_the_training_records(tmp_path, drawn, capsys):
    runs = []
    for name, loads in (("a", [1.5, 1.25]), ("b", [2.0, None, 3])):
        runs.append(write(tmp_path / name, [3.0]))
        with open(tmp_path / name / "records.jsonl", "a", encoding="utf-8") as file:
            for step, load in enumerate(loads, 1):
                line = {"kind": "train", "version": 1, "step": step, "tokens": 100 * step, "seconds": 1.0, "loss": 2.0}
                file.write(json.dumps(line | ({} if load is None else {"expert_load": load})) + "\n")
    axes = drawn(*runs, "--metric=expert_load")
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert found == [([100, 200], [1.5, 1.25]), ([100, 300], [2.0, 3.0])]
    assert axes.get_ylabel() == "expert_load" and axes.get_xlabel() == "training tokens"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    with pytest.raises(ConfigError) as error:
        drawn(runs[0], "--metric=tokens")
    assert str(error.value).replace(str(tmp_path), "DIR") == (
        "--metric: 'tokens'; DIR/a has no such number in its training records; accepted: expert_load or loss"
    )
    with pytest.raises(ConfigError, match=r"it has none; accepted: another run$"):
        drawn(write(tmp_path / "c", [3.0]), "--metric=loss")
