"""The figure of `jaxformer curves`: one axis, one unit, and all of every run on it."""

import json

import matplotlib.figure
import pytest

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
