"""A trace holds the steps that were asked for, and nothing is traced, compiled or kept otherwise."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import from_mapping
from jaxformer.training.step_trace import StepTrace


@jax.jit
def double(x):
    return 2 * x


def traced(folder, steps, dispatches, step=0):
    """What was said, and the step numbers of the annotations that JAX's own reader finds."""
    said: list[str] = []
    trace = StepTrace(steps, folder, said.append)
    x = jnp.ones(3)
    for count in dispatches:
        x = trace(double, step, count, x)
        step += count
    trace.close()
    assert x[0] == 2 ** len(dispatches)
    found = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name == "train":
                        found.append(dict(event.stats)["step_num"])
    return said, sorted(found)


def test_the_dispatches_that_hold_the_steps_are_traced(tmp_path):
    said, found = traced(tmp_path, (5, 9), [4, 4, 4, 4])
    assert found == [5, 9] and said == [f"trace of steps 5 to 12: {tmp_path}"]


@pytest.mark.parametrize(("steps", "dispatches"), [(None, [4]), ((5, 9), [4]), ((3, 4), [])])
def test_nothing_else_is(tmp_path, steps, dispatches):
    assert traced(tmp_path, steps, dispatches) == ([], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("steps", "begins"), [
    *(pytest.param(steps, [1], marks=pytest.mark.slow) for steps in ((4, 4), (1, 4))), ((5, 8), [5]), ((4, 5), [1, 5]),
])  # fmt: skip
def test_the_ends_of_dispatches(tmp_path, steps, begins):
    said, found = traced(tmp_path, steps, [4, 4, 4])
    assert found == begins and said == [f"trace of steps {begins[0]} to {begins[-1] + 3}: {tmp_path}"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def full(stop=jax.profiler.stop_trace):
        stop()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    said, _ = traced(tmp_path, (1, 4), [4, 4])
    assert said == ["note: no trace of step 1 on (RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device)"]


def test_a_run_that_goes_on_after_them_traces_nothing(tmp_path):
    assert traced(tmp_path, (1, 4), [4, 4], step=4) == ([], [])


def test_one_step_in_the_middle_of_a_dispatch(tmp_path):
    assert traced(tmp_path, (6, 6), [4, 4, 4])[1] == [5]


def test_a_run_that_ends_inside_leaves_what_it_has(tmp_path):
    assert traced(tmp_path, (1, 99), [2, 2])[1] == [1, 3]


def test_another_trace_in_this_process_is_left_alone(tmp_path):
    with jax.profiler.trace(str(tmp_path / "other")):
        said, _ = traced(tmp_path / "mine", (1, 2), [2])
    assert len(said) == 1 and said[0].startswith("note: no trace of step 1 on (")
    assert list((tmp_path / "other").rglob("*.xplane.pb")) and not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_xprof_opens_it(tmp_path):
    """In a process of its own, as its messages are many."""
    if importlib.util.find_spec("xprof") is None:
        pytest.skip("xprof is in the extra `services`")
    assert traced(tmp_path, (1, 4), [2, 2])[1] == [1, 3]
    (file,) = tmp_path.rglob("*.xplane.pb")
    program = (
        "import json, sys; from xprof.convert import raw_to_tool_data as read\n"
        "viewed, _ = read.xspace_to_tool_data([sys.argv[1]], 'trace_viewer', {})\n"
        "print(sorted({e['name'] for e in json.loads(viewed)['traceEvents'] if 'step_num' in e.get('args', {})}))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "['train 1', 'train 3']"


def test_the_field_takes_two_numbers():
    assert from_mapping({}, {"train.profile_steps": "100,105"}).train.profile_steps == (100, 105)
    assert from_mapping({}, {"train.profile_steps": "none"}).train.profile_steps is None
