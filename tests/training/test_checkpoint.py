"""A checkpoint is valid or it is named and passed over; nothing silent, nothing lost."""

import asyncio
import errno
import functools
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toy import ToyBatches, make_config, make_model, numpy_params

from jaxformer.config import CheckpointConfig
from jaxformer.errors import CheckpointError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.specs import abstract_params
from jaxformer.training import state as states
from jaxformer.training.checkpoint import checksum, failures
from jaxformer.training.checkpoint.failures import reason_of
from jaxformer.training.checkpoint.manager import Checkpoints, restore_params
from jaxformer.training.checkpoint.orbax_logging import Quiet
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps

KEEP_ALL = CheckpointConfig(keep=10)


def place(state, mesh_config, devices=None):
    """The state on a mesh, and the abstract state of that mesh."""
    abstract = abstract_on(tuple(mesh_config.items()), devices and tuple(devices))
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, abstract), abstract


@functools.cache
def abstract_on(axes, devices):
    config = make_config(optimizer={"ema_decay": 0.9}, mesh=dict(axes))
    model = make_model()
    optimizer = make_optimizer(config.optimizer, 12, model.specs)
    return states.abstract_state(model, optimizer, make_mesh(config.mesh, devices), ema=True)


@functools.cache
def example():
    """A state with random numbers everywhere, as numpy."""
    config = make_config(optimizer={"ema_decay": 0.9})
    model = make_model()
    shapes = states.state_shapes(model, make_optimizer(config.optimizer, 12, model.specs), ema=True)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (1000 * rng.normal(size=s.shape)).astype(s.dtype), shapes)


def one_device():
    return place(example(), {}, jax.devices()[:1])


def shifted(state, by):
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x) + np.asarray(by, x.dtype), x.sharding), state)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, 1 and 2; the directory, the two states, and what to restore into."""
    state, abstract = one_device()
    first, second = state, shifted(state, 1)
    with_closing = Checkpoints(tmp_path / "run", KEEP_ALL, "print")
    with_closing.save(1, first)
    with_closing.save(2, second)
    with_closing.close()
    return tmp_path / "run", first, second, abstract


def test_what_is_saved_comes_back_bit_for_bit(saved):
    directory, _, second, abstract = saved
    restored, step = Checkpoints(directory, KEEP_ALL).restore(abstract)
    assert step == 2 and equal(restored, second)
    assert jax.tree.structure(restored) == jax.tree.structure(second)
    meta = json.loads((directory / "2" / "meta" / "metadata").read_text())
    assert meta["step"] == 2 and meta["fingerprint"] == "print"
    assert meta["leaves"]["params.blocks.w_up"][:2] == [[2, 8, 16], "float32"]


@pytest.mark.slow
def test_nothing_to_restore_is_none_and_needs_no_orbax(tmp_path):
    script = f"""
import sys
from jaxformer.config import CheckpointConfig
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.state import TrainState
store = Checkpoints({str(tmp_path / "none")!r}, CheckpointConfig())
assert store.steps() == [] and store.restore(TrainState(*[None] * 7)) is None
assert "orbax.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("target", [
    pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow), {"fsdp": 2, "tensor": 4, "data": 1}, None,
])  # fmt: skip
def test_another_mesh_restores_the_same_bits(tmp_path, target):
    state, _ = place(example(), {"data": 2, "fsdp": 2, "tensor": 2})
    store = Checkpoints(tmp_path, KEEP_ALL)
    store.save(5, state)
    store.close()
    _, abstract = one_device() if target is None else place(example(), target)
    restored, step = Checkpoints(tmp_path, KEEP_ALL).restore(abstract)
    assert step == 5 and equal(restored, example())
    for x, a in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
        assert x.sharding.is_equivalent_to(a.sharding, x.ndim)


def damage_byte(directory):
    path = max((directory / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damage_params_byte(directory):
    path = max((directory / "params").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_truncate(directory):
    path = max((directory / "params").rglob("d/*"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_delete(directory):
    shutil.rmtree(directory / "ema")


def damage_manifest(directory):
    (directory / "params" / "manifest.ocdbt").unlink()


def damage_meta(directory):
    path = directory / "meta" / "metadata"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def damage_empty(directory):
    shutil.rmtree(directory)
    directory.mkdir()


def damage_pipe(directory):
    """Whoever opens it waits for a writer."""
    path = max((directory / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    path.unlink()
    os.mkfifo(path)


def test_a_pipe_in_an_older_checkpoint_does_not_stop_the_next_save(saved, capfd):
    """Of which orbax reads the metadata of every step, and would wait."""
    directory, _, state, abstract = saved
    odd = directory / "1" / "_CHECKPOINT_METADATA"
    odd.unlink()
    os.mkfifo(odd)
    store = Checkpoints(directory, KEEP_ALL)
    assert store.restore(abstract)[1] == 2
    store.save(3, state)
    store.close()
    assert store.steps() == [2, 3]
    assert capfd.readouterr().err.splitlines() == [
        f"checkpoint {directory / '1'} is not valid: {odd} is not a regular file",
        f"deleting the invalid checkpoint {directory / '1'}",
    ]


DAMAGES = [
    damage_byte, damage_params_byte, damage_truncate, damage_delete, damage_manifest, damage_meta, damage_empty,
    damage_pipe,
]  # fmt: skip


# Each of these restores two checkpoints, which takes orbax seconds.
LONG = (damage_byte, damage_params_byte, damage_truncate, damage_delete, damage_manifest)


@pytest.mark.parametrize("damage", [pytest.param(d, marks=pytest.mark.slow if d in LONG else ()) for d in DAMAGES])
def test_an_unsound_checkpoint_is_named_and_passed_over(saved, damage, capfd):
    directory, first, _, abstract = saved
    damage(directory / "2")
    store = Checkpoints(directory, KEEP_ALL)
    restored, step = store.restore(abstract)
    assert step == 1 and equal(restored, first)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"checkpoint {directory / '2'} is not valid: ") and len(lines[0]) < 400
    assert (directory / "2").exists()  # nothing is deleted until there is something to save
    # going on, a save of the same step, or of a later one, takes its place
    later = shifted(first, 2)
    store.save(2, later)
    store.close()
    assert capfd.readouterr().err.splitlines() == [f"deleting the invalid checkpoint {directory / '2'}"]
    restored, step = Checkpoints(directory, KEEP_ALL).restore(abstract)
    assert step == 2 and equal(restored, later)


def test_one_number_of_the_arrays_is_noticed(saved, monkeypatch):
    """Orbax alone restores this; the checksum does not."""
    directory, _, _, abstract = saved
    real = ocp.StandardCheckpointHandler.restore

    def wrong(self, path, *args, **kwargs):
        found = real(self, path, *args, **kwargs)
        if path.parts[-2:] == ("2", "ema"):
            w = found["blocks"]["w_up"]
            found["blocks"]["w_up"] = w.at[1, 2, 3].set(jnp.nextafter(w[1, 2, 3], jnp.inf))
        return found

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", wrong)
    said = []
    _, step = Checkpoints(directory, KEEP_ALL, warn=said.append).restore(abstract)
    assert step == 1 and "checksum of ema.blocks.w_up differs; trying an older one" in said[0]


def test_none_sound_is_an_error(saved):
    directory, _, _, abstract = saved
    for step in ("1", "2"):
        damage_meta(directory / step) if step == "2" else damage_empty(directory / step)
    said = []
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid \(2 tried"):
        Checkpoints(directory, KEEP_ALL, warn=said.append).restore(abstract)
    assert len(said) == 2 and sorted(os.listdir(directory)) == ["1", "2"]


def test_another_model_is_said_in_one_line(saved):
    directory, _, _, abstract = saved
    blocks = abstract.params["blocks"]
    other = abstract._replace(
        params={**abstract.params, "blocks": {**blocks, "w_up": jax.ShapeDtypeStruct((2, 8, 32), np.float32)}}
    )
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory, KEEP_ALL).restore(other)
    text = str(error.value)
    assert "is of another model: params.blocks.w_up is float32[2,8,16] there, float32[2,8,32] here" in text
    assert "\n" not in text
    halved = abstract._replace(step=jax.ShapeDtypeStruct((), np.int16))
    with pytest.raises(CheckpointError, match=r"state\.step is int32\[\] there, int16\[\] here"):
        Checkpoints(directory, KEEP_ALL).restore(halved)
    with pytest.raises(CheckpointError, match=r"missing"):
        Checkpoints(directory, KEEP_ALL).restore(abstract._replace(opt_state=()))


def test_saving_does_not_see_what_training_does_next(tmp_path):
    """The save is in the background, and the very next step overwrites (donates) the arrays being saved."""
    config = make_config(train={"steps": 60})
    mesh, model = make_mesh(config.mesh, jax.devices()[:1]), make_model()
    run = compile_steps(model, make_optimizer(config.optimizer, 60, model.specs), mesh, config)
    state, batches, store, kept = run.init(), ToyBatches(8), Checkpoints(tmp_path, KEEP_ALL), {}
    for step in range(0, 15, 3):
        state, _ = run.train(state, *run.place_chunk([batches[step + i] for i in range(3)]))
        kept[step + 3] = jax.tree.map(np.array, state)
        store.save(step + 3, state)
    store.close()
    for step in (15, 12, 9):
        restored, found = Checkpoints(tmp_path, KEEP_ALL).restore(run.abstract_state)
        assert found == step and equal(restored, kept[step])
        shutil.rmtree(tmp_path / str(step))


@pytest.mark.slow
def test_how_many_are_kept(tmp_path):
    state, _ = one_device()
    store = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_every_steps=10))
    for step in (5, 10, 15, 20, 25, 27):
        store.save(step, state)
    store.close()
    assert store.steps() == [10, 20, 25, 27]


def test_saving_the_same_step_twice_writes_once(tmp_path):
    state, abstract = one_device()
    store = Checkpoints(tmp_path, KEEP_ALL)
    store.save(3, state)
    store.wait()
    inode = (tmp_path / "3").stat().st_ino
    store.save(3, state)
    store.close()
    again = Checkpoints(tmp_path, KEEP_ALL)
    again.restore(abstract)
    again.save(3, state)
    again.close()
    assert (tmp_path / "3").stat().st_ino == inode


@pytest.mark.slow
def test_parameters_alone(saved, capfd):
    directory, first, second, _ = saved
    abstract = abstract_params(make_model().specs)
    for item, expected in ((None, second.ema), ("ema", second.ema), ("params", second.params)):
        params, step = restore_params(directory, abstract, item=item)
        assert step == 2 and equal(params, expected)
        assert params["blocks"]["w_up"].devices() == {jax.devices()[0]}
    assert equal(restore_params(directory, abstract, item="params", step=1)[0], first.params)
    damage_byte(directory / "2")  # of the optimizer's state, which is not read
    assert restore_params(directory, abstract)[1] == 2
    damage_params_byte(directory / "2")
    assert restore_params(directory, abstract, item="params")[1] == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and "is not valid" in lines[0] and lines[1] == "the checkpoint of step 1 is taken instead"
    with pytest.raises(CheckpointError, match=r"is valid \(1 tried\)"):
        restore_params(directory, abstract, item="params", step=2)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        restore_params(directory / "nowhere", abstract)


def test_parameters_without_an_average(tmp_path):
    state, _ = one_device()
    store = Checkpoints(tmp_path, KEEP_ALL)
    store.save(1, state._replace(ema=None))
    store.close()
    abstract = abstract_params(make_model().specs)
    assert equal(restore_params(tmp_path, abstract)[0], state.params)
    with pytest.raises(CheckpointError, match="has no ema; it holds params, state"):
        restore_params(tmp_path, abstract, item="ema")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_harms_nothing(saved, monkeypatch, capfd):
    directory, _, second, abstract = saved
    store = Checkpoints(directory, KEEP_ALL)
    usage = shutil.disk_usage(directory)
    monkeypatch.setattr(failures.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError) as error:
        store.save(3, second)
    reason = "no space left on the disk; older checkpoints are intact: 1, 2"
    assert str(error.value) == f"checkpoint of step 3 in {directory} not written: {reason}"
    monkeypatch.undo()
    assert equal(Checkpoints(directory, KEEP_ALL).restore(abstract)[0], second)
    store.save(4, second)  # once there is room it goes on
    store.close()
    assert store.steps() == [1, 2, 4] and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [os_error_code='28']"), "no space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left on the disk"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (RuntimeError("x\n" * 500), "x x x"),
    ],
)
def test_a_failed_write_is_one_line(error, words):
    text = reason_of(error)
    assert words in text and "\n" not in text and len(text) < 200


@pytest.mark.slow
def test_a_write_that_fails_half_way(tmp_path):
    """A real one: the process may not write files larger than 1 KB, so orbax fails in its own threads."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import *
state, abstract = one_device()
store = Checkpoints({str(tmp_path)!r}, KEEP_ALL)
store.save(1, state)
store.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
try:
    store.save(2, shifted(state, 1))
    store.close()
except CheckpointError as error:
    print("LINE", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
found, step = Checkpoints({str(tmp_path)!r}, KEEP_ALL).restore(abstract)
assert step == 1 and equal(found, state)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("LINE")]
    assert "checkpoint of step 2" in line and line.endswith("older checkpoints are intact: 1")
    assert "orbax" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def on_host(x):
    """An array's checksum as that of a small state, which the host sums."""
    return checksum.checksums({"x": x})["x"]


def on_devices(x):
    """As that of a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "SMALL_STATE_BYTES", -1)
        return on_host(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float64"])
def test_checksums_agree_on_host_and_devices(dtype):
    x = (100 * np.random.default_rng(0).normal(size=(8, 33, 5)).clip(0)).astype(jnp.dtype(dtype))
    mesh = make_mesh(make_config(mesh={"data": 2, "fsdp": 4}).mesh)
    with jax.enable_x64(True):
        split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp", None, None)))
        (value,) = {on_host(x), on_host(split), on_devices(x), on_devices(split)}
        for other in (x.reshape(33, 8, 5).swapaxes(0, 1), np.roll(x, 1, axis=2)):
            assert on_host(other) == on_devices(other) != value


def test_checksums_notice_an_exchange_far_apart():
    x = np.arange(3 * 2**15 + 7, dtype=np.float32)
    assert on_host(x) == on_devices(x) != on_host(np.roll(x, 2**15))


def test_checksums_notice_every_bit():
    x = numpy_params()["blocks"]["w_up"]
    seen = {on_host(x)}
    for bit in range(32):
        bits = x.view(np.uint32).copy()
        bits[1, 2, 3] ^= np.uint32(1 << bit)
        seen.add(on_host(bits.view(np.float32)))
    assert len(seen) == 33


def test_a_copy_under_another_step_is_passed_over(saved, capfd):
    directory, _, second, abstract = saved
    shutil.copytree(directory / "2", directory / "7")
    restored, step = Checkpoints(directory, KEEP_ALL).restore(abstract)
    assert step == 2 and equal(restored, second)
    assert restore_params(directory, abstract_params(make_model().specs))[1] == 2
    lines = capfd.readouterr().err.splitlines()
    reason = f"checkpoint {directory / '7'} is not valid: it holds step 2: the folder was copied or renamed"
    assert lines == [f"{reason}; trying an older one", reason, "the checkpoint of step 2 is taken instead"]


RUN, OTHER, OLD, OLDER = "a" * 32, "b" * 32, "c" * 16, "d" * 16


@pytest.mark.parametrize(
    ("stored", "expected", "also", "outcome"),
    [
        (RUN, RUN, (), "silent"), (OTHER, RUN, (), "refused"), (OLD, RUN, (), "refused"), ("", RUN, (), "refused"),
        (RUN, "", (), "silent"), (OLD, OLD, (), "silent"), (OLDER, OLD, (OLDER,), "silent"), (OLDER, OLD, (), "said"),
        ("", OLD, (), "said"), (RUN, OLD, (), "refused"), ("x", OLD, (), "refused"),
    ],
)  # fmt: skip
def test_whose_checkpoint_it_is(tmp_path, stored, expected, also, outcome):
    state, abstract = one_device()
    store = Checkpoints(tmp_path, KEEP_ALL, stored)
    store.save(3, state)
    store.close()
    said, params = [], abstract_params(make_model().specs)
    store = Checkpoints(tmp_path, KEEP_ALL, expected, warn=said.append, also=also)
    if outcome == "refused":
        line = f"3 is of another run: its fingerprint is {stored or 'empty'}, this run's {expected}"
        for read in (
            lambda: store.restore(abstract),
            lambda: restore_params(tmp_path, params, fingerprint=expected, also=also),
        ):
            with pytest.raises(CheckpointError, match=f"{line}$"):
                read()
        assert store.steps() == [3]
        return
    assert store.restore(abstract)[1] == 3
    assert restore_params(tmp_path, params, fingerprint=expected, also=also)[1] == 3
    assert len(said) == (outcome == "said") and all("of an earlier version" in line for line in said)


def test_only_our_own_names_are_steps(saved, tmp_path, capfd):
    directory, _, _, abstract = saved
    for name in ("²", "0003", "٣", "-4", "8.tmp"):
        (directory / name).mkdir()
    (directory / "9").symlink_to(directory / "1")
    (directory / "6").write_text("")
    store = Checkpoints(directory, KEEP_ALL)
    assert store.steps() == [1, 2] and store.restore(abstract)[1] == 2
    assert restore_params(directory, abstract_params(make_model().specs))[1] == 2
    assert capfd.readouterr().err == f"checkpoint {directory / '9'} is a symbolic link, which is not followed\n"


@pytest.mark.slow
def test_what_the_machine_refuses_is_no_damage(saved, monkeypatch):
    """Else the checkpoint would be called invalid, and removed at the next save."""
    directory, _, second, abstract = saved
    store = Checkpoints(directory, KEEP_ALL)
    for error in (OSError(errno.EMFILE, "Too many open files"), MemoryError(), ValueError("x: Too many open files")):

        def refuse(*_, error=error, **__):
            raise RuntimeError("orbax") from error

        with monkeypatch.context() as patch:
            patch.setattr(ocp.StandardCheckpointHandler, "restore", refuse)
            with pytest.raises(CheckpointError, match=r"checkpoint .*/2 cannot be read: "):
                store.restore(abstract)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(CheckpointError, match=r"checkpoint .*/2 cannot be read: Too many open files"):
            store.restore(abstract)
    store.save(3, second)
    store.close()
    assert store.steps() == [1, 2, 3]


def damaged_beyond_one_array(directory):
    """So that several arrays fail while others are being read."""
    for path in (directory / "params").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


@pytest.mark.slow
def test_of_a_damaged_array_nothing_is_told_but_our_lines(saved, capfd, caplog):
    directory, _, _, _ = saved
    damaged_beyond_one_array(directory / "2")
    hook, filters = sys.unraisablehook, [list(logging.getLogger(name).filters) for name in ("absl", "asyncio")]
    for _ in range(5):
        assert restore_params(directory, abstract_params(make_model().specs), item="params")[1] == 1
    gc.collect()
    said = capfd.readouterr().err.splitlines()
    assert all("/2 is not valid" in line for line in said[::2]) and len(said) == 10 and not caplog.records
    assert said[1::2] == ["the checkpoint of step 1 is taken instead"] * 5
    assert sys.unraisablehook is hook
    assert filters == [list(logging.getLogger(name).filters) for name in ("absl", "asyncio")]


@pytest.mark.slow
def test_a_users_own_messages_pass_while_orbax_is_kept_quiet(tmp_path, caplog, monkeypatch):
    """Whatever their path, and what goes wrong in their own coroutines and destructors as well."""
    code = compile("import logging\nlogging.getLogger('absl').warning('mine')", "/home/me/orbax/run.py", "exec")
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))

    class Loud:
        def __del__(self):
            raise ValueError("mine too")

    async def broken():
        try:
            await asyncio.sleep(0)
        finally:
            raise ValueError("mine as well")

    with Quiet(), Quiet():
        exec(code, {})
        Loud()
        begun = broken()
        begun.send(None)
        del begun
        gc.collect()
        orbax = str(Path(sys.modules["orbax.checkpoint"].__file__).parent / "x.py")
        space = {"sleep": asyncio.sleep}
        theirs = """
import logging
logging.getLogger("absl").warning("theirs")
async def broken():
    try:
        await sleep(0)
    finally:
        raise ValueError("theirs")
"""
        exec(compile(theirs, orbax, "exec"), space)
        begun = space["broken"]()
        begun.send(None)
        del begun
        gc.collect()
    assert [record.getMessage() for record in caplog.records] == ["mine"]
    assert seen == ["mine too", "mine as well"]


def test_a_save_is_quiet_until_it_is_written_and_no_longer(tmp_path):
    state, _ = one_device()
    hook = sys.unraisablehook
    store = Checkpoints(tmp_path, KEEP_ALL)
    store.save(1, state)
    assert sys.unraisablehook is not hook
    store.wait()
    assert sys.unraisablehook is hook
    store.save(2, state)
    store.close()
    assert sys.unraisablehook is hook
