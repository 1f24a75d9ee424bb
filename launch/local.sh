#!/usr/bin/env bash
# Trains with several processes on this machine, and starts them again when one of them is lost.
#
#     PROCESSES=2 CPU_DEVICES=4 launch/local.sh --config=configs/gpt_tiny.py
#     PROCESSES=8 GPUS=1 launch/local.sh --config=configs/gpt2_124m.py --config.mesh.fsdp=8
#
# Environment (no hyperparameters):
#   PROCESSES     processes (2)
#   CPU_DEVICES   CPU devices of each; unset: what JAX finds
#   GPUS          GPUs of each, the next ones of this machine; unset: every process sees all of them
#   PORT          of process 0 (a free one)
#   RESTARTS      starts again after a crash without a newer checkpoint (3)
#   WAIT_SECONDS  that the others get to end by themselves when one process has ended, before they are killed (120)
#   PYTHON        the interpreter (python)
#
# Exit code: 0 finished; 75 interrupted and saved (SIGTERM or Ctrl-C, to this script or to any process): the same
# command goes on; 2 refused, 3 diverged: not started again; any other: it crashed too often without progress.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

processes=${PROCESSES:-2}
python=${PYTHON:-python}
pids=()
stopping=

say() { echo "local.sh: $*" >&2; }

train() { exec "$python" -m jaxformer pretrain "$@"; }

stop() { # by a signal to this script: each process is told, and all of them save
    stopping=yes
    for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null; done
}
trap stop TERM INT

start() {
    local port=${PORT:-} i first
    if [ -z "$port" ]; then
        port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    fi
    export JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$processes" JAX_PROCESS_ID
    if [ -n "${CPU_DEVICES:-}" ]; then export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$CPU_DEVICES"; fi
    pids=()
    for ((i = 0; i < processes; i++)); do
        JAX_PROCESS_ID=$i
        if [ -n "${GPUS:-}" ]; then
            first=$((i * GPUS))
            CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + GPUS - 1)))
            export CUDA_VISIBLE_DEVICES
        fi
        train "$@" &
        pids+=("$!")
    done
    say "started processes 0 to $((processes - 1)) at $JAX_COORDINATOR_ADDRESS: ${pids[*]}"
}

# Waits for all; leaves their exit codes in `codes`. From the first end on, the others have WAIT_SECONDS.
codes=()
finish() {
    local left=$processes began="" i
    codes=()
    while ((left > 0)); do
        for ((i = 0; i < processes; i++)); do
            if [ -n "${codes[i]:-}" ] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
            wait "${pids[i]}" 2>/dev/null
            codes[i]=$?
            left=$((left - 1))
            if [ "${codes[i]}" != 0 ]; then say "process $i ended with code ${codes[i]}${began:+ $((SECONDS - began)) s after the first}"; fi
            began=${began:-$SECONDS}
        done
        if [ -n "$began" ] && ((left > 0 && SECONDS - began > ${WAIT_SECONDS:-120})); then
            for ((i = 0; i < processes; i++)); do
                if [ -z "${codes[i]:-}" ] && kill -KILL "${pids[i]}" 2>/dev/null; then
                    say "killing process $i, which has not ended by itself in ${WAIT_SECONDS:-120} s"
                fi
            done
        fi
        sleep 0.2
    done
}

has() { # whether any process ended with this code
    local code
    for code in "${codes[@]}"; do if [ "$code" = "$1" ]; then return 0; fi; done
    return 1
}

newest() { env -u JAX_NUM_PROCESSES "$python" -m jaxformer pretrain --newest-step "$@"; }

before=$(newest "$@") || exit $?
failures=0
while :; do
    if [ -n "$stopping" ]; then exit 75; fi
    start "$@"
    finish
    for code in 2 3; do if has "$code"; then exit "$code"; fi; done
    if has 130; then exit 130; fi
    if [ -n "$stopping" ] || has 75; then exit 75; fi
    worst=0
    for code in "${codes[@]}"; do if ((code > worst)); then worst=$code; fi; done
    if ((worst == 0)); then exit 0; fi
    step=$(newest "$@") || exit $?
    if ((step > before)); then failures=0; fi
    failures=$((failures + 1))
    before=$step
    if ((failures > ${RESTARTS:-3})); then
        say "crashed $failures times without a checkpoint newer than step $step: giving up"
        exit "$worst"
    fi
    say "starting again from step $step (restart $failures of ${RESTARTS:-3} without progress)"
done
