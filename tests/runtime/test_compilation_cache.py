"""Compiled programs on disk: what is damaged is compiled again, with one line; what killed a process is named."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxformer.runtime.compilation_cache import MARKS, NOW, CheckedCache
from tests.forks import forks

# Three programs that XLA deserialises, and small ones around them: a product, a loop, a sort; the sum of all that they
# give, and how many were loaded.
PROGRAM = """
import jax, jax.numpy as jnp
from jaxformer.runtime.program import keep_compiled_programs
keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
x = jax.device_put(jax.numpy.arange(64.0).reshape(8, 8))
product = jax.jit(lambda x: jnp.tanh(x @ x.T / 1e3))(x)
loop = jax.jit(lambda x: jax.lax.scan(lambda c, row: (jnp.sin(c + row), c.sum()), x[0], x)[1])(product)
order = jax.jit(lambda x: jnp.argsort(x.ravel() * 7 % 5))(loop)
print(product.sum(), loop.sum(), order[:3], len(hits))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs PROGRAM with a cache folder; a fork of a process that has imported it all."""
    folder, bare = tmp_path_factory.mktemp("programs"), ("JAX_COMPILATION", "JAX_PERSISTENT", "XLA_FLAGS")
    (folder / "compiles.py").write_text(PROGRAM)
    (folder / "dies.py").write_text(DYING)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(bare)} | {"JAX_PLATFORMS": "cpu"}
    with forks(folder, kept):

        def run(cache: Path, *words: str, program="compiles", **env: str) -> subprocess.CompletedProcess:
            words, env = [folder / "forked", program, *words], {**kept, "XDG_CACHE_HOME": str(cache), **env}
            return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)

        yield run


def entries(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*-cache"))
    assert len(found) >= 3, "the programs were kept"
    return found


@pytest.fixture(scope="module")
def kept(run, tmp_path_factory):
    """A cache folder with programs in it, where they lie, and what is said when they are loaded, and when none is."""
    cache = tmp_path_factory.mktemp("compiled")
    first = run(cache)
    again = run(cache)
    assert first.stderr == again.stderr == "" and first.returncode == again.returncode == 0
    (values, none), (same, loaded) = (each.stdout.rsplit(" ", 1) for each in (first, again))
    assert values == same and int(none) == 0 and int(loaded) > 2, "the second start loads them"
    return cache, cache / "jaxformer" / "compiled", again.stdout, first.stdout


def damaged(run, kept, damages, line):
    """Damages every entry, in turns; the programs run right, saying one line, and are kept again."""
    cache, folder, right, compiled = kept
    for path, damage in zip(entries(folder), itertools.cycle(damages), strict=False):
        damage(path)
    hurt = run(cache)
    assert hurt.returncode == 0, (hurt.returncode, hurt.stderr[-500:])
    assert hurt.stdout == compiled, "right, and nothing damaged was loaded"
    assert hurt.stderr.count("\n") == 1 and line in hurt.stderr and str(folder) in hurt.stderr
    whole = run(cache)
    assert (whole.returncode, whole.stdout, whole.stderr) == (0, right, "")


def flip(path, place):
    content = bytearray(path.read_bytes())
    last = len(content) - 1
    content[place(last)] ^= 1 << random.Random(last).randrange(8)
    path.write_bytes(content)


@pytest.mark.slow
def test_a_flipped_bit_is_not_loaded_wherever_it_is(run, kept):
    """The first byte's, one in the middle, the last byte's, and two anywhere."""
    dice = random.Random(0)
    places = [lambda last: 0, lambda last: last // 2, lambda last: last, *[lambda last: dice.randint(0, last)] * 2]
    flips = [lambda path, place=place: flip(path, place) for place in places]
    damaged(run, kept, flips, "a compiled program was damaged and is compiled again")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["empty, cut or of another program", "link", "folder"])
def test_what_is_no_longer_the_entry_is_not_loaded(run, kept, tmp_path, how):
    _, folder, right, _ = kept
    others = dict(zip(entries(folder), [path.read_bytes() for path in reversed(entries(folder))], strict=True))
    elsewhere = tmp_path / "elsewhere"
    if how.startswith("empty"):
        ways = [
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            lambda path: path.write_bytes(others[path] if others[path] != path.read_bytes() else b"x"),
        ]
        damaged(run, kept, ways, "a compiled program was damaged")
    elif how == "link":
        elsewhere.write_bytes(b"mine")

        def link(path):
            path.unlink()
            path.symlink_to(elsewhere)

        damaged(run, kept, [link], "its program is compiled again")
        assert elsewhere.read_bytes() == b"mine" and not any(path.is_symlink() for path in entries(folder))
    else:  # never removed: nobody here made it
        path = entries(folder)[0]
        path.unlink()
        path.mkdir()
        try:
            found = run(kept[0])
            assert found.returncode == 0 and found.stdout.split()[:2] == right.split()[:2]
            assert path.is_dir() and 1 <= found.stderr.count("\n") <= 2 and "Traceback" not in found.stderr
        finally:
            path.rmdir()
            run(kept[0])


@pytest.mark.slow
def test_entries_without_a_checksum_are_compiled_again_without_a_word(run, kept):
    """Those of a version that had none: a line would only alarm."""
    cache, folder, right, compiled = kept
    for path in folder.glob(f"{MARKS}/*-*"):
        path.unlink()
    old = run(cache)
    assert (old.returncode, old.stderr, old.stdout) == (0, "", compiled)
    assert run(cache).stdout == right


@pytest.mark.slow
def test_a_folder_of_the_user_s_choice_is_checked_as_well(run, kept, tmp_path):
    cache, _, _, compiled = kept
    chosen = tmp_path / "mine"
    env = {"JAX_COMPILATION_CACHE_DIR": str(chosen)}
    assert run(cache, **env).returncode == 0
    for path in entries(chosen):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    hurt = run(cache, **env)
    assert hurt.returncode == 0 and hurt.stdout == compiled
    assert hurt.stderr == f"note: {chosen}: a compiled program was damaged and is compiled again\n"


@pytest.mark.slow
def test_with_a_limited_size_as_well(run, kept, tmp_path):
    pytest.importorskip("filelock")
    cache, _, right, compiled = kept
    chosen = tmp_path / "mine"
    env = {"JAX_COMPILATION_CACHE_DIR": str(chosen), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30)}
    assert run(cache, **env).stdout == compiled
    for path in entries(chosen):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    hurt = run(cache, **env)
    assert (hurt.returncode, hurt.stdout, hurt.stderr.count("\n")) == (0, compiled, 1)
    assert run(cache, **env).stdout == right


@pytest.mark.slow
def test_a_checksum_folder_that_is_a_link_is_not_followed(run, tmp_path):
    folder, elsewhere = tmp_path / "jaxformer" / "compiled", tmp_path / "elsewhere"
    folder.mkdir(parents=True)
    elsewhere.mkdir()
    (folder / MARKS).symlink_to(elsewhere)
    found = run(tmp_path)
    assert found.returncode == 0
    assert found.stderr == f"note: {folder / MARKS} is a link or no folder; compiled programs are not kept\n"
    assert list(elsewhere.iterdir()) == [] and list(folder.glob("*-cache")) == []


# Dies while it "loads" an entry: between `get` and JAX's word that it is loaded.
DYING = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from jaxformer.runtime.compilation_cache import CheckedCache
cache = CheckedCache(SimpleNamespace(eviction_enabled=False), Path(sys.argv[1]))
for key in ("jit_fine-1", "jit_broken-2"):
    assert cache.get(key) is not None
print("loading", flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


def keep_two(folder):
    cache = CheckedCache(SimpleNamespace(eviction_enabled=False), folder)
    for key in ("jit_fine-1", "jit_broken-2"):
        cache.put(key, key.encode())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS])
def test_who_dies_while_loading_is_told_of_at_the_next_start(run, tmp_path, capsys, number):
    keep_two(tmp_path)
    died = run(tmp_path, str(tmp_path), str(int(number)), program="dies")
    assert died.returncode == 128 + number and died.stdout == "loading\n"
    cache = CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)
    said = capsys.readouterr().err
    assert said == (
        f"note: {tmp_path}: a process died by a signal while it loaded jit_broken from here; it is compiled again\n"
    )
    assert cache.get("jit_broken-2") is None and cache.get("jit_fine-1") == b"jit_fine-1"
    assert not [path for path in (tmp_path / MARKS / NOW).iterdir() if str(os.getpid()) not in path.name]
    CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)
    assert capsys.readouterr().err == "", "told once"


@pytest.mark.slow
def test_who_is_killed_while_loading_says_nothing_about_the_entry(run, tmp_path, capsys):
    keep_two(tmp_path)
    assert run(tmp_path, str(tmp_path), str(int(signal.SIGKILL)), program="dies").returncode == 128 + signal.SIGKILL
    cache = CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)
    assert capsys.readouterr().err == "" and cache.get("jit_broken-2") == b"jit_broken-2"


@pytest.mark.slow
def test_a_process_that_lives_is_left_alone(tmp_path, capsys):
    keep_two(tmp_path)
    living = subprocess.Popen([sys.executable, "-c", DYING.replace("os.kill(", "import time; time.sleep(60); ("),
                               str(tmp_path), "0"], stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert living.stdout.readline() == b"loading\n"
        CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)
        assert capsys.readouterr().err == ""
        assert [path for path in (tmp_path / MARKS / NOW).iterdir() if f"-{living.pid}-" in path.name]
    finally:
        living.kill()
        living.communicate()


def test_a_journal_names_entries_of_its_own_folder_only(tmp_path, capsys):
    victim = tmp_path / "victim-cache"
    victim.write_text("mine")
    folder = tmp_path / "folder"
    keep_two(folder)
    names = ["../victim", str(tmp_path / "victim")]
    (folder / MARKS / NOW / "host-1-a.journal").write_text("".join(f"+{x}\n" for x in names) + "Fatal Python error\n")
    os.mkfifo(folder / MARKS / NOW / "host-2-b.journal")
    CheckedCache(SimpleNamespace(eviction_enabled=False), folder)
    assert victim.read_text() == "mine" and capsys.readouterr().err == ""


def test_half_written_entries_are_removed_when_old(tmp_path):
    keep_two(tmp_path)
    old, new = tmp_path / MARKS / NOW / "a.half", tmp_path / MARKS / NOW / "b.half"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)
    assert new.exists() and not old.exists()


def test_a_full_disk_costs_time_and_one_line(tmp_path, capsys, monkeypatch):
    cache = CheckedCache(SimpleNamespace(eviction_enabled=False), tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.put("jit_f-1", b"x" * 10)
    cache.put("jit_g-2", b"x" * 10)
    assert capsys.readouterr().err == f"note: {tmp_path}: compiled programs cannot be kept (No space left on device)\n"
    assert list((tmp_path / MARKS / NOW).iterdir()) == [] and cache.get("jit_f-1") is None
