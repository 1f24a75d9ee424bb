#!/usr/bin/env bash
# Trains on all workers of a Cloud TPU VM (a slice), from any machine with gcloud, and starts again when a worker is lost.
#
#     TPU=my-v5e-16 ZONE=us-west4-a launch/tpu_vm.sh --config=configs/gpt2_124m.py --config.workdir=gs://my-bucket/gpt2
#
# Edit nothing; the environment says where (no hyperparameters):
#   TPU, ZONE     name and zone of the TPU VM; PROJECT (gcloud's own)
#   FOLDER        of the repository on the workers (jaxformer, in the home folder)
#   SETUP         run on every worker first (e.g. 'git clone ... && pip install -e jaxformer[tpu]'); unset: nothing
#   RESTARTS      starts again after a crash without a newer checkpoint (3)
#   PYTHON        the interpreter on the workers (python3)
# The working directory and the text must lie where all workers see them (a bucket, or a mounted disk).
#
# JAX asks the TPU VM's metadata server who the workers are. SIGTERM or Ctrl-C to this script is passed on: all save the
# same step. A spot TPU VM that is taken away is gone: create it again and run the same command.
# Exit code: as of launch/local.sh.
set -uo pipefail

: "${TPU:?the name of the TPU VM}" "${ZONE:?its zone}"
folder=${FOLDER:-jaxformer}
python=${PYTHON:-python3}
stopping=

say() { echo "tpu_vm.sh: $*" >&2; }

on() { # worker, command
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"} --worker="$1" --command="$2"
}

train=$(printf '%q ' "$python" -u -m jaxformer pretrain "$@")
mine=jaxformer-$$-$RANDOM # marks our processes on the workers

stop() {
    stopping=yes
    say "telling all workers to save and stop"
    on all "kill -TERM \$(cat /tmp/$mine.pid)" </dev/null
}

newest() { on 0 "cd $folder && $train --newest-step" </dev/null | tail -1 | tr -d '\r'; }

if [ -n "${SETUP:-}" ]; then on all "$SETUP" || exit $?; fi
before=$(newest) || exit $?
failures=0
while :; do
    say "starting on all workers of $TPU from step $before"
    on all "cd $folder && echo \$\$ >/tmp/$mine.pid && exec $train" </dev/null &
    gcloud=$!
    trap stop TERM INT
    wait "$gcloud"
    code=$?
    while kill -0 "$gcloud" 2>/dev/null; do # a signal ended the wait, not the job
        wait "$gcloud"
        code=$?
    done
    trap - TERM INT
    case $code in 0 | 2 | 3 | 75) exit $code ;; esac
    if [ -n "$stopping" ]; then exit 75; fi
    step=$(newest) || exit $?
    if ((step > before)); then failures=0; fi
    failures=$((failures + 1))
    before=$step
    if ((failures > ${RESTARTS:-3})); then
        say "ended $failures times (code $code) without a checkpoint newer than step $step: giving up"
        exit "$code"
    fi
    say "ended with code $code; starting again from step $step (restart $failures of ${RESTARTS:-3} without progress)"
done
