#!/usr/bin/env bash
# Real SLURM on this one machine: a controller and two nodes of our own, `sbatch launch/slurm.sbatch`, `scontrol requeue`
# and other disturbances in the middle, and it must finish with the losses of an undisturbed run. Takes 2 to 5 minutes.
#
#     tests/launch/slurm.sh
#
# Needs slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm munge, which it tries as root), and root, because
# the daemons want it and because the nodes' names have to be in /etc/hosts. Everything else lies in a folder that is
# removed at the end, with the daemons.
# Exit code: 0 passed; 77 not run, with the reason in the last line; any other: failed.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
limit=${LIMIT_SECONDS:-420}
python=${PYTHON:-$(command -v python)}

PATH=$PATH:/usr/sbin:/sbin # where the daemons are, on the path or not
not_run() { echo "SLURM TEST NOT RUN: $*"; exit 77; }

[ "$(id -u)" = 0 ] || not_run "it needs root"
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    command -v apt-get >/dev/null || not_run "SLURM is not installed, and there is no apt-get"
    said=$( (timeout 60 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 180 apt-get install -y \
        --no-install-recommends slurm-wlm munge) 2>&1) || not_run "apt-get: $(tail -1 <<<"$said")"
fi
if command -v pgrep >/dev/null && pgrep -x slurmctld >/dev/null; then not_run "a slurmctld runs here already"; fi

work=$(mktemp -d /tmp/jaxformer-slurm.XXXXXX)
chmod 755 "$work"
mkdir -m 700 "$work/munge" && mkdir -m 755 "$work/run"
added=
daemons=()
cleanup() {
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do kill "${daemons[i]}" 2>/dev/null || true; done
    sleep 1
    for pid in "${daemons[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    if [ -n "$added" ]; then # in place: where /etc/hosts is mounted it cannot be replaced
        local kept
        kept=$(grep -v 'jaxformer slurm test' /etc/hosts)
        printf '%s\n' "$kept" >/etc/hosts
    fi
    rm -rf "$work"
}
trap cleanup EXIT

if ! getent hosts jfnode1 >/dev/null; then
    echo "127.0.0.1 jfnode1 jfnode2 # jaxformer slurm test" >>/etc/hosts || not_run "/etc/hosts cannot be written"
    added=yes
fi

head -c 1024 /dev/urandom >"$work/munge/key" && chmod 400 "$work/munge/key"
munged --foreground --force --key-file="$work/munge/key" --socket="$work/run/munge" --pid-file="$work/munge/pid" \
    --seed-file="$work/munge/seed" --log-file="$work/munge/log" >/dev/null 2>&1 &
daemons+=($!)

host=$(hostname -s)
cat >"$work/slurm.conf" <<CONF
ClusterName=jaxformer
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/run/munge
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/ctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/ctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=500000
KillWait=60
RebootProgram=/bin/true
NodeName=jfnode[1-2] NodeAddr=127.0.0.1 NodeHostname=$host Port=[17001-17002] CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=jfnode[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
sed -i '/^CryptoType/d;/^RebootProgram/d' "$work/slurm.conf"
mkdir "$work/state" "$work/spool-jfnode1" "$work/spool-jfnode2"
export SLURM_CONF=$work/slurm.conf
for ((i = 0; i < 50; i++)); do if [ -S "$work/run/munge" ]; then break; fi; sleep 0.1; done
slurmctld -D -f "$SLURM_CONF" >"$work/ctld.out" 2>&1 &
daemons+=($!)
for node in jfnode1 jfnode2; do
    slurmd -D -N "$node" -f "$SLURM_CONF" >"$work/$node.out" 2>&1 &
    daemons+=($!)
done
tell() { for file in "$work"/*.out "$work"/ctld.log "$work"/slurmd-*.log "$work/job.log"; do echo "-- $file"; tail -20 "$file" 2>/dev/null || true; done; }
for ((until = SECONDS + 30; SECONDS < until; )); do # without a controller a single sinfo takes ten seconds
    if [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ]; then break; fi
    if ! kill -0 "${daemons[1]}" 2>/dev/null; then break; fi
    sleep 0.5
done
if [ "$(sinfo -h -t idle -o %D 2>/dev/null)" != 2 ]; then
    tell
    not_run "the daemons do not start here (their logs are above)"
fi
sinfo

cat >"$work/config.py" <<'CONFIG'
from ml_collections import ConfigDict


def get_config():
    return ConfigDict({
        "model": {"num_layers": 1, "width": 32, "num_heads": 4, "context_length": 32, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 20_000,
                 "validation_fraction": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "mesh": {"fsdp": 2},
        "train": {"steps": 150, "batch_rows": 8, "steps_per_dispatch": 2, "eval_every_steps": 75, "log_every_steps": 1},
        "checkpoint": {"save_every_steps": 10},
        "distributed": {"mode": "on", "heartbeat_timeout_seconds": 15},
    })
CONFIG
arguments=("--config=$work/config.py" "--config.data.cache_dir=$work/cache")
export PYTHON=$python PYTHONPATH=$root JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2
export JAX_COMPILATION_CACHE_DIR=$work/compiled

state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }

job=$(sbatch --parsable --output="$work/job.log" --cpus-per-task=1 launch/slurm.sbatch "${arguments[@]}" "--config.workdir=$work/run1")
echo "submitted batch job $job"
# Three disturbances, each once the job has saved something new: SLURM takes the job away; it tells the processes to stop,
# as before the time runs out, and the script queues the job again; one process is lost, and the script starts again.
phase=0
last=0
while :; do
    now=$(state "$job")
    if [ "$now" = COMPLETED ]; then break; fi
    case $now in FAILED | CANCELLED | TIMEOUT | NODE_FAIL) tell; echo "the job ended as $now"; exit 1 ;; esac
    step=$(find "$work/run1/checkpoints" -maxdepth 1 -name '[0-9]*0' -printf '%f\n' 2>/dev/null | sort -n | tail -1 || true)
    if ((phase < 3 && ${step:-0} > last)); then
        case $phase in
        0) what="scontrol requeue $job" ;;
        1) what="scancel --signal=TERM $job" ;;
        2) what="kill -KILL $(pgrep -n -f "^$python -u -m jaxformer pretrain.*$work/run1")" ;;
        esac
        echo "after $SECONDS s, at step $step: $what"
        $what
        phase=$((phase + 1))
        last=$((step + 20)) # beyond what is saved because of this
    fi
    # SLURM lets a requeued job wait for two minutes, which none has here; one that starts within the second in which it
    # was taken away is refused ("Job credential revoked"), and ends as FAILED.
    if [ "$now" = PENDING ] && ((phase > 0)); then
        sleep 2
        scontrol update "JobId=$job" StartTime=now 2>/dev/null || true
    fi
    if ((SECONDS > limit)); then tell; echo "not finished in $limit s"; exit 1; fi
    sleep 1
done
cat "$work/job.log"
((phase == 3)) || { echo "it finished before it could be disturbed three times"; exit 1; }
[ "$(grep -c "2 processes (SLURM), 4 devices" "$work/job.log")" = 4 ]
[ "$(grep -c "going on from step" "$work/job.log")" = 3 ]
grep -q "interrupted and saved at step .*; queueing it again" "$work/job.log"
grep -q "starting again from step .* (restart 1 of 3 without progress)" "$work/job.log"
grep -q "stopped at step .* by SIGTERM, saved" "$work/job.log"
grep -q "finished at step 150" "$work/job.log"
JAX_NUM_CPU_DEVICES=4 "$python" -m jaxformer pretrain "${arguments[@]}" "--config.workdir=$work/run2" \
    --config.distributed.mode=off >"$work/alone.log" 2>&1
"$python" - "$work" <<'CHECK'
import sys
from pathlib import Path

import numpy as np

from jaxformer import records


def losses(name):
    return {r["step"]: r["loss"] for r in records.latest(records.load(Path(sys.argv[1]) / name / "records.jsonl", "train"))}


found, alone = losses("run1"), losses("run2")
assert list(found) == list(alone) == list(range(1, 151)), (len(found), len(alone))
np.testing.assert_allclose(list(found.values()), list(alone.values()), rtol=1e-4)
print("150 losses, the disturbed run on two nodes beside an undisturbed one in one process: largest relative difference",
      max(abs(found[s] / alone[s] - 1) for s in found))
CHECK
echo "SLURM TEST PASSED in $SECONDS s"
