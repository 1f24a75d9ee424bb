#!/usr/bin/env bash
# Every open question about the TPUs of one VM, best first. In an environment with `pip install -e '.[tpu]'`:
#
#     experiments/benchmarks/tpu.sh runs/tpu
#     experiments/benchmarks/tpu.sh --dry runs/tpu-dry    # every part in little, on CPU
#
# A part that is done is not done again (`PART.done`), one that fails is said and does not stop the others. The records
# are JSON lines; `README.md` in the folder is written from them after every part. A train step's time and utilisation
# are those of short pretrainings, whose parameters lie on all chips.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
dry=
if [ "${1:-}" = --dry ]; then dry=--dry && shift; fi
out=${1:?folder for the records}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# shellcheck source-path=SCRIPTDIR
source experiments/benchmarks/parts.sh

if [ -n "$dry" ]; then
    export JAX_PLATFORMS=cpu
    part exactness python -m jaxformer.benchmarks.exactness --dry --out="$out/exactness.jsonl"
    part attention-64 benchmark --suite=attention --dtype=bfloat16 --tokens=64 --pairs=1 --out="$out/attention.jsonl"
    part pretrain-tiny pretraining pretrain-tiny --config=configs/gpt_tiny.py --config.train.steps=20 \
        --config.model.width=48 --config.model.context_length=32 --config.train.eval_every_steps=20 \
        --config.train.profile_steps=10,12
    part sweep benchmark --suite=sweep --size=0.1 --pairs=1 --out="$out/sweep.jsonl"
else
    python -c 'import jax; d = jax.devices(); assert d[0].platform == "tpu", d; print(f"{d[0].device_kind}, {len(d)} of them")' |
        tee "$out/device.txt" || exit 1
    chips=$(python -c 'import jax; print(jax.device_count())')
    part exactness python -m jaxformer.benchmarks.exactness --out="$out/exactness.jsonl"
    for shape in gpt2_124m gpt2_350m gpt2_1_5b; do
        part "pretrain-$shape" pretraining "pretrain-$shape" --config="configs/$shape.py" --config.data.source=stdlib \
            --config.train.steps=100 --config.train.eval_every_steps=100 --config.optimizer.warmup_steps=10 \
            --config.mesh.fsdp="$chips" --config.train.profile_steps=50,53
    done
    for tokens in 1024 4096 16384 65536; do
        part "attention-$tokens" benchmark --suite=attention --dtype=bfloat16 --tokens="$tokens" --pairs=5 \
            --out="$out/attention.jsonl"
    done
    part decode benchmark --suite=decode_lengths --shape=gpt2 --dtype=bfloat16 --rows=8 --pairs=3 --out="$out/decode.jsonl"
    part sweep benchmark --suite=sweep --size=2.0 --pairs=1 --out="$out/sweep.jsonl"
fi
finish
