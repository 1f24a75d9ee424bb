"""Bad tables and bad flags for experiments.fit; the lines stand in bad_input.md."""

import os
import subprocess
import sys

import numpy as np
import pytest
from bad_input_cases import expected, place  # noqa: F401

HEADER = "n,d,loss"


def rows() -> list[list[str]]:
    """A table that can be fitted: five budgets of six sizes."""
    budget = np.repeat(np.geomspace(1e17, 1e19, 5), 6)
    n = np.sqrt(budget / 120) * np.tile(np.geomspace(1 / 6, 6, 6), 5)
    d = budget / 6 / n
    loss = (1.8 + 480 * n**-0.35 + 2000 * d**-0.37) * np.exp(0.005 * np.random.default_rng(0).standard_normal(30))
    return [[f"{value:.8g}" for value in row] for row in zip(n, d, loss, strict=True)]


def table(column: int = 0, cell: str | None = None, header: str = HEADER) -> str:
    """The table as text, the fourth row's cell replaced."""
    lines = rows()
    if cell is not None:
        lines[3][column] = cell
    return "\n".join([header, *(",".join(line) for line in lines)]) + "\n"


def fit(place, content: str | bytes, *flags: str) -> tuple[int, str]:  # noqa: F811
    """Fits a table; what the folder holds afterwards is what it held before."""
    path = place.folder / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(place.folder.rglob("*"))
    common = ["--n=n", "--d=d", "--loss=loss", "--no-figures", "--bootstrap=100", f"--out={place.folder / 'out'}"]
    outcome = place.run("fit", f"--csv={path}", *common, *flags)
    assert sorted(place.folder.rglob("*")) == before
    return outcome


@pytest.mark.parametrize(
    "case, flag",
    [
        ("fit: a negative seed", "--seed=-1"),
        ("fit: no FLOPs per parameter and token", "--flops-constant=0"),
        ("fit: FLOPs per parameter and token that are no number", "--flops-constant=nan"),
        ("fit: negative FLOPs per parameter and token", "--flops-constant=-6"),
        ("fit: infinite FLOPs per parameter and token", "--flops-constant=inf"),
        ("fit: too many replicates", "--bootstrap=1000000000000"),
        ("fit: a delta that rounds to nothing", "--delta=1e-300"),
        ("fit: a budget out of range", "--budget=1e308"),
        ("fit: out is nothing", "--out="),
        ("fit: no such column", "--n=parms"),
    ],
)
def test_flags(place, case, flag):  # noqa: F811
    assert fit(place, table(), flag) == (2, expected()[case])


@pytest.mark.parametrize(
    "case, column, cell",
    [
        ("fit: a cell of 200 kB", 0, "9" * 200_000),
        ("fit: a number of 4400 digits", 0, "1" * 4400),
        ("fit: a loss of 1e308", 2, "1e308"),
        ("fit: a size of 1e-308", 0, "1e-308"),
        ("fit: a negative loss", 2, "-3"),
        ("fit: a cell with a terminal's control characters", 0, "\x1b[31mred"),
        ("fit: a number above every float", 0, "1e99999999"),
    ],
)
def test_cells(place, case, column, cell):  # noqa: F811
    assert fit(place, table(column, cell)) == (2, expected()[case])


@pytest.mark.parametrize(
    "case, content",
    [
        ("fit: NUL bytes", table().encode()[:100] + b"\0" + table().encode()[100:]),
        ("fit: UTF-16 without a byte-order mark", table().encode("utf-16-le")),
        ("fit: two columns of one name", table(header="n,d,loss,n").encode()),
        ("fit: one row", table().encode()[: table().index("\n", 12) + 1]),
        ("fit: identical rows", "\n".join([HEADER, *[",".join(rows()[0])] * 30]).encode()),
        ("fit: an empty file", b""),
        ("fit: a header alone", b"n,d,loss\n"),
    ],
)
def test_files(place, case, content):  # noqa: F811
    assert fit(place, content) == (2, expected()[case])


def test_what_is_no_file(place):  # noqa: F811
    """A folder, a pipe nobody writes to and a device are refused at once, not waited for."""
    folder, pipe = place.folder / "folder.csv", place.folder / "pipe.csv"
    folder.mkdir()
    os.mkfifo(pipe)
    rest = ["--n=n", "--d=d", "--loss=loss", f"--out={place.folder / 'out'}"]
    assert place.run("fit", f"--csv={folder}", *rest) == (2, expected()["fit: a folder"])
    assert place.run("fit", f"--csv={pipe}", *rest) == (2, expected()["fit: a pipe"])
    assert place.run("fit", "--csv=/dev/zero", *rest) == (2, expected()["fit: a device"])


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_are_read(place, encoding):  # noqa: F811
    path = place.folder / "table.csv"
    path.write_bytes(table().encode(encoding))
    flags = ["--n=n", "--d=d", "--loss=loss", "--no-figures", "--bootstrap=100", f"--out={place.folder / 'out'}"]
    assert place.run("fit", f"--csv={path}", *flags) == (0, "")


@pytest.mark.slow
def test_equal_losses_pin_nothing_and_end_well(place):  # noqa: F811
    """A flat valley has no minimum: said, not a traceback."""
    content = "\n".join([HEADER, *(f"{n},{d},3.0" for n, d, _ in rows())])
    path = place.folder / "table.csv"
    path.write_text(content)
    flags = ["--n=n", "--d=d", "--loss=loss", "--no-figures", "--bootstrap=100", f"--out={place.folder / 'out'}"]
    assert place.run("fit", f"--csv={path}", *flags) == (0, "")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    """`| head -1`: the one line, and nothing on standard error (it was nine lines)."""
    path = tmp_path / "table.csv"
    path.write_text(table())
    command = (
        f"{sys.executable} -m experiments.fit --csv={path} --n=n --d=d --loss=loss --no-figures --bootstrap=100 "
        f"--holdout=0 --out={tmp_path / 'out'} | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == "", done.stderr
