"""Standard output and error cannot stop a program: encodings, full disks, closed descriptors, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.runtime import console

ROOT = Path(__file__).parents[2]
PRINTS = """
import sys
from jaxformer.runtime.program import program
def main():
    for _ in range(3):
        print("loss 5.38 ± 0.04 é", flush=True)
    open("done", "w").close()
program(main, printing=len(sys.argv) < 2)
"""
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(folder, line, code=PRINTS, **environment):
    """Runs `code` in a shell line in which it is $run; the finished process and whether it came to its end."""
    script = folder / "script.py"
    script.write_text(code)
    run = f"{sys.executable} {script}"
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=os.environ | variables | {"run": run}, capture_output=True, text=True,
        encoding="utf-8", check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done, (folder / "done").exists()


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(x, marks=pytest.mark.slow) for x in ("iso8859-1:strict", "utf-8"))]
)
def test_a_sign_that_the_encoding_lacks(tmp_path, encoding):
    """Printing it was a UnicodeEncodeError, which ended a training at its first evaluation."""
    done, ended = shell(tmp_path, "$run | iconv -f ${PYTHONIOENCODING%:*} -t utf-8", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr, ended) == (0, "", True)
    assert done.stdout == 3 * ("loss 5.38 +- 0.04 \\xe9\n" if encoding == "ascii" else "loss 5.38 ± 0.04 é\n")


@full
@pytest.mark.slow
def test_a_full_disk_behind_standard_output(tmp_path):
    done, ended = shell(tmp_path, "$run work >/dev/full")
    assert (done.returncode, ended) == (0, True)
    assert done.stderr == "note: standard output cannot be written (No space left on device) and is lost\n"
    done, ended = shell(tmp_path, "$run >/dev/full")  # what it prints is what it is run for
    assert (done.returncode, ended) == (2, True)
    assert done.stderr == "error: standard output: cannot be written (No space left on device)\n"
    done, ended = shell(tmp_path, "$run work >/dev/full 2>/dev/full")
    assert (done.returncode, ended, done.stderr) == (0, True, "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors(tmp_path, closed):
    """A file that a program opens does not get the number of one, and with it what libraries print there."""
    code = PRINTS.replace("open(", "assert open('other', 'w').fileno() > 2; print('x', file=sys.stderr); open(")
    done, ended = shell(tmp_path, f"$run work {closed}", code)
    assert (done.returncode, ended) == (0, True)


def test_a_reader_that_goes_away(tmp_path):
    code = PRINTS.replace("range(3)", "range(30_000)")
    done, _ = shell(tmp_path, "set -o pipefail; $run | head -1", code)
    assert (done.returncode, done.stdout, done.stderr) == (1, "loss 5.38 ± 0.04 é\n", "")


@pytest.mark.slow
def test_a_pipe_that_does_not_wait(tmp_path):
    """What shares a terminal or pipe may have set O_NONBLOCK: writing more than fits was a BlockingIOError."""
    code = "import os; os.set_blocking(1, False)" + PRINTS.replace("range(3)", "range(30_000)")
    done, ended = shell(tmp_path, "$run | (sleep 1; wc -l)", code)
    assert (done.returncode, int(done.stdout), ended) == (0, 30_000, True)


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_line_is_there_as_soon_as_it_is_printed(tmp_path, unbuffered):
    """In a file or pipe it came with the next 8 KB or the end, PYTHONUNBUFFERED or not: an empty log for minutes."""
    code = """
import os, sys
from jaxformer.runtime.program import program
def main():
    print("step 1")
    print("note: a", file=sys.stderr)
    os._exit(0)  # as a kill: nothing is flushed
program(main)
"""
    done, _ = shell(tmp_path, "$run", code, PYTHONUNBUFFERED=unbuffered)
    assert (done.stdout, done.stderr) == ("step 1\n", "note: a\n")


def test_what_is_not_the_process_s_own_stays(capsys):
    out = sys.stdout
    assert console.secure() is None and sys.stdout is out


@pytest.mark.slow
def test_no_home_folder(tmp_path):
    code = PRINTS.replace("open(", "import pathlib; pathlib.Path.home(); open(")
    done, ended = shell(tmp_path, "env -u HOME $run", "import os, pwd\npwd.getpwuid = lambda uid: {}[uid]\n" + code)
    assert (done.returncode, ended) == (2, False)
    assert done.stderr == (
        "error: HOME: is not set, and this user has no home folder; accepted: HOME=FOLDER, or XDG_CACHE_HOME=FOLDER\n"
    )


@pytest.mark.slow
def test_a_backend_that_does_not_exist(tmp_path):
    code = PRINTS.replace("open(", "import jax; jax.devices(); open(")
    done, _ = shell(tmp_path, "$run", code, JAX_PLATFORMS="nonsense")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: JAX_PLATFORMS: 'nonsense' (Unable to initialize backend 'nonsense'")


@pytest.mark.slow
def test_debug_shows_where(tmp_path):
    code = PRINTS.replace("open(", "raise __import__('jaxformer').ConfigError('config.a: b'); open(")
    for flags, lines in ("", 1), ("--debug", 8):
        script = tmp_path / "debug.py"
        script.write_text(code)
        run = [sys.executable, str(script), *flags.split()]
        done = subprocess.run(
            run, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        found = done.stderr.splitlines()
        assert done.returncode == 2 and found[-1] == "error: config.a: b" and len(found) >= lines
        assert ("Traceback" in done.stderr) == bool(flags) and (len(found) == 1) != bool(flags)
