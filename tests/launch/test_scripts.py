"""The launch scripts say what shells and Kubernetes understand, and all run the same command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"
LAUNCHERS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
SCRIPTS = [
    *LAUNCHERS, ROOT / "tests" / "launch" / "slurm.sh",
    *(ROOT / "experiments" / "benchmarks" / f"{name}.sh" for name in ("gpu", "tpu")),
]  # fmt: skip
MANIFESTS = sorted(LAUNCH.glob("*.yaml"))


def tool(name: str) -> str:
    """A program of the `test` extra, beside the interpreter."""
    return str(shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or name)


def test_there_is_one_for_each_place():
    assert {path.name for path in LAUNCH.iterdir()} == {
        "README.md", "Dockerfile", "local.sh", "slurm.sbatch", "tpu_vm.sh",
        "gke-gpu.yaml", "gke-gpu-job.yaml", "gke-tpu.yaml", "gke-tpu-job.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(path):
    done = subprocess.run([tool("shellcheck"), "-x", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


@pytest.mark.parametrize("path", [*LAUNCHERS, *MANIFESTS], ids=lambda path: path.name)
def test_all_run_the_same_command_and_say_what_to_edit(path):
    text = path.read_text()
    assert '-m jaxformer pretrain "$@"' in text
    header = text[: text.index("\n\n")] if path.suffix != ".yaml" else text[: text.index("apiVersion")]
    assert "# Edit" in header or "# Environment" in header
    assert "config=configs/" in text  # an example
    assert "--config.optimizer" not in text and "--config.model" not in text and "--config.train" not in text


def jobs(path: Path) -> list[dict]:
    """The Jobs of a manifest: its own, or those that a JobSet makes."""
    found = []
    for each in yaml.safe_load_all(path.read_text()):
        if each["kind"] == "Job":
            found.append(each)
        for job in each["spec"].get("replicatedJobs", []):
            name = {"name": f"{each['metadata']['name']}-{job['name']}-0"}
            found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": name, **job["template"]})
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path, tmp_path):
    """Strictly, where there is a schema: there is none for JobSet itself, so what it holds is checked as Jobs."""
    given = [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] != "JobSet"]
    copy = tmp_path / path.name
    copy.write_text(yaml.safe_dump_all([*given, *(job for job in jobs(path) if job not in given)]))
    done = subprocess.run([tool("kubernetes-validate"), "--strict", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0 and "passed for resource job/" in done.stdout + done.stderr, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_agree_with_themselves_and_with_our_exit_codes(path):
    (job,) = jobs(path)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    if "gpu" in path.name:
        assert environment["JAX_NUM_PROCESSES"] == str(spec["completions"])
        host = environment["JAX_COORDINATOR_ADDRESS"].partition(":")[0]
        assert host == f"{job['metadata']['name']}-0.jaxformer"
    rules = {
        rule["action"]: rule.get("onExitCodes", {}).get("values")
        for rule in reversed(spec["podFailurePolicy"]["rules"])
    }
    assert rules == {"FailJob": [2, 3], "Ignore": [75]}
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60


GCLOUD = """#!/usr/bin/env bash
# gcloud compute tpus tpu-vm ssh NAME --zone=Z --worker=W --command=C, on this machine
for word in "$@"; do
    case $word in --command=*) command=${word#--command=} ;; --worker=*) worker=${word#--worker=} ;; esac
done
echo "$worker: $command" >>"$FAKE_LOG"
exec bash -c "$command"
"""

PYTHON = """#!/usr/bin/env bash
# A run that crashes twice, each time one checkpoint further, and then finishes.
case "$*" in *--newest-step*) cat "$FAKE_STEP"; exit ;; esac
[ "$*" = "-u -m jaxformer pretrain --config=a b.py" ] || exit 2
step=$(($(cat "$FAKE_STEP") + ${FAKE_PROGRESS:-1}))
echo "$step" >"$FAKE_STEP"
((step > 2)) && exit 0
exit 134
"""


@pytest.mark.parametrize(("progress", "code", "starts"), [("1", 0, 3), ("0", 134, 2)])
def test_tpu_vm_starts_again_while_there_is_progress(tmp_path, progress, code, starts):
    """With a gcloud that runs the commands here: no TPU VM was at hand."""
    (tmp_path / "bin").mkdir()
    for name, text in (("gcloud", GCLOUD), ("python3", PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "step").write_text("0\n")
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TPU": "t", "ZONE": "z", "RESTARTS": "1",
        "FAKE_LOG": str(tmp_path / "log"), "FAKE_STEP": str(tmp_path / "step"), "FAKE_PROGRESS": progress,
        "FOLDER": str(tmp_path),
    }  # fmt: skip
    command = [str(LAUNCH / "tpu_vm.sh"), "--config=a b.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum(line.startswith("all:") for line in lines) == starts
    assert ("giving up" in done.stderr) == (code != 0)
