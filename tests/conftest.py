"""Eight CPU devices for every test, and JAX's strict modes; set before any backend is used."""

import atexit
import gc
import itertools
import lzma
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Tests, their workers and the programs they start share what they compile; made anew for every run of the tests.
    folder = tempfile.mkdtemp(prefix="jaxformer-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

import jax
import pytest
from jax._src.interpreters import mlir

from jaxformer.runtime.compilation_cache import guard

gc.set_threshold(200_000, 20, 100)  # what is traced lives on: looking for garbage in it took a tenth of the time
guard()  # what a test compiles has its checksum, so that the programs that tests start believe it
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads where the operations of a test's program are
# Doctests, which no fixture below reaches, and what is compiled while tests are collected; see `quick_compile`.
jax.config.update("jax_disable_most_optimizations", True)


def of_small_texts(format=lzma.FORMAT_XZ, check=-1, preset=None, filters=None, made=lzma.LZMACompressor):
    """`xz -9`, whose tables are for 64 MiB and take 0.06 s for each corpus, with such as 4 MiB of text can use."""
    if filters is None and format == lzma.FORMAT_XZ:
        level = lzma.PRESET_DEFAULT if preset is None else preset
        preset, filters = None, [{"id": lzma.FILTER_LZMA2, "preset": level, "dict_size": 1 << 22}]
    return made(format, check, preset, filters)


lzma.LZMACompressor = of_small_texts  # type: ignore[misc, assignment]
os.fsync = lambda handle: None  # no test pulls the plug; tests of their own watch where it is called


class Contexts(threading.local):
    """What JAX lowers a program in: each serves ten of a thread, as in jax 0.12; a new one for each small program was a
    sixth of its time, of an operation outside of jit half."""

    make, made, uses = staticmethod(mlir.make_ir_context), None, 0

    def __call__(self):
        if self.uses % 10 == 0:
            self.made = self.make()
        self.uses += 1
        return self.made


if jax.__version_info__ < (0, 12):
    mlir.make_ir_context = Contexts()

STARTED = time.monotonic()
collect_ignore = ["extensions"]  # config files that register what they bring when they are read; no tests


def pytest_addoption(parser):
    parser.addoption("--turn", type=int, help="which file is first, 0 to 255; the others follow in a ring")
    parser.addoption("--seconds", type=float, help="no test begins later than this; what was not reached is skipped")


@pytest.hookimpl(trylast=True)  # of those that the marks leave
def pytest_collection_modifyitems(config, items):
    """Begins with the file whose turn it is, so that what a landing has no time for is another part each time."""
    if (turn := config.getoption("--turn")) is not None:
        files = sorted({item.path for item in items})
        first = turn * len(files) // 256
        items.sort(key=lambda item: (files.index(item.path) - first) % len(files))


LATE = "not reached in time; `.ci/run slow` has no limit"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips, and says so, what `--seconds` leaves no time for."""
    limit = item.config.getoption("--seconds")
    if limit is not None and time.monotonic() - STARTED > limit:
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter):
    """Says of which files that was; in one line, because of a long log only the end is kept, where the failures are."""
    late = [each for each in terminalreporter.stats.get("skipped", ()) if LATE in str(each.longrepr)]
    if late:
        files = Counter(Path(each.nodeid.partition("::")[0]).stem.removeprefix("test_") for each in late)
        named = ", ".join(f"{name} {number}" for name, number in files.items())
        terminalreporter.write_line(f"not reached: {named}")


def pytest_configure(config):
    """Has tests compiled by XLA's older generator of loops for CPU: in 0.4 of the time, the fast suite takes 0.66.

    The newer one, which users get, compiles those marked `optimized` where .ci/run runs them with the slow ones, and
    everything from jax 0.11 on, which has no other. And in one piece: small programs are not worth several threads.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
    laws = any(part in config.option.markexpr for part in ("not slow", "not optimized"))
    if laws and jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"


# Files and folders whose slow tests compile without most optimizations, as all fast ones do: where laws are checked
# on a few numbers, most of the time is XLA's, and most of that its optimizations'.
QUICK = {
    "functional",
    "models",
    "decoding",
    "training",
    "test_pretrain.py",
    "test_modules.py",
    "test_specs.py",
    "test_extension.py",
    "test_generate_and_fill_mask.py",
    "test_translate.py",
    "test_own_kinds.py",
    "test_warm_start.py",
    "test_distilling.py",
    "test_changes.py",
    "test_manifest.py",
    "test_tasks.py",
    "test_mixture_run.py",
    "test_encoder_decoder_run.py",
    "interchange",
    "test_meshes.py",
    "test_task_meshes.py",
    "test_peers.py",
    "test_peers_disentangled.py",
    "test_peers_encoder_decoder.py",
    "test_peers_fsmt.py",
    "test_peers_tasks.py",
    "test_peers_xlnet.py",
    "test_peers_lm_eval.py",
    "test_continuations.py",
}


@pytest.fixture(scope="module", autouse=True)
def quick_modules(request):
    """What the fixtures of a module compile."""
    jax.config.update("jax_disable_most_optimizations", bool(QUICK & {request.path.name, request.path.parent.name}))
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def quick_compile(request):
    """Compiles without most optimizations the fast tests and the slow ones that QUICK names, unless they are marked
    `optimized`: an initial value of normal numbers takes a tenth of the time."""
    quick = "slow" not in request.keywords or bool(QUICK & {request.path.name, request.path.parent.name})
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick and "optimized" not in request.keywords)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_mappings(request):
    """Every program compiled for CPU keeps a few memory mappings, and Linux gives a process 65,530: beyond, the next
    compilation ends in a segmentation fault. So the programs are dropped when half of them are gone. Counting 15,000
    takes 20 ms, hence only after every 32nd fast test and every eighth slow one."""
    yield
    maps, each = Path("/proc/self/maps"), 8 if "slow" in request.keywords else 32
    if next(TESTS) % each == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
