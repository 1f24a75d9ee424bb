#!/usr/bin/env bash
# Every open question about one NVIDIA GPU, best first, in about 25 minutes. In an environment with
# `pip install -e '.[cuda,peers]'`:
#
#     experiments/benchmarks/gpu.sh runs/gpu
#     experiments/benchmarks/gpu.sh --dry runs/gpu-dry    # every part in little, on CPU, with Pallas's interpreter
#
# A part that is done is not done again (`PART.done`), one that fails is said and does not stop the others. The records
# are JSON lines; `README.md` in the folder is written from them after every part. The rows of the train steps fit an
# H200 (139 GiB) with both frameworks in memory; for smaller GPUs: ROWS="8 4 1".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
dry=
if [ "${1:-}" = --dry ]; then dry=--dry && shift; fi
out=${1:?folder for the records}
mkdir -p "$out"
out=$(cd "$out" && pwd)
read -r -a rows <<<"${ROWS:-32 16 8}"
# shellcheck source-path=SCRIPTDIR
source experiments/benchmarks/parts.sh

if [ -n "$dry" ]; then
    export JAX_PLATFORMS=cpu
    part exactness python -m jaxformer.benchmarks.exactness --dry --out="$out/exactness.jsonl"
    part autotune python -m jaxformer.benchmarks.autotune --dry --table="$out/blocks.json"
    part train-tiny benchmark --suite=train --shape=tiny --dtype=bfloat16 --pairs=1 --out="$out/train.jsonl"
    part attention-64 benchmark --suite=attention --dtype=bfloat16 --tokens=64 --pairs=1 --out="$out/attention.jsonl"
    part decode benchmark --suite=decode --shape=tiny --pairs=1 --out="$out/decode.jsonl"
    part sweep benchmark --suite=sweep --size=0.1 --pairs=1 --out="$out/sweep.jsonl"
    part pretrain pretraining pretrain --config=configs/gpt_tiny.py --config.train.steps=20 --config.optimizer.warmup_steps=2 \
        --config.model.width=48 --config.model.context_length=32 --config.train.eval_every_steps=20 \
        --config.train.profile_steps=10,12
else
    export XLA_PYTHON_CLIENT_PREALLOCATE=false # torch and the processes beside need memory too
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/device.txt" || exit 1
    part autotune python -m jaxformer.benchmarks.autotune --runs=5
    cp jaxformer/kernels/attention/flash_gpu_blocks.json "$out/blocks.json"
    shapes=(gpt2 gpt2_350m gpt2_1_5b)
    for i in 0 1 2; do
        part "train-${shapes[i]}" benchmark --suite=train --shape="${shapes[i]}" --dtype=bfloat16 --rows="${rows[i]}" \
            --pairs=5 --out="$out/train.jsonl"
    done
    part exactness python -m jaxformer.benchmarks.exactness --out="$out/exactness.jsonl"
    for tokens in 1024 4096 16384 65536; do
        part "attention-$tokens" benchmark --suite=attention --dtype=bfloat16 --tokens="$tokens" --pairs=5 \
            --out="$out/attention.jsonl"
    done
    part pretrain pretraining pretrain --config=configs/gpt2_124m.py --config.data.source=stdlib --config.train.steps=60 --config.train.eval_every_steps=60 --config.train.eval_rows=96 \
        --config.optimizer.warmup_steps=10 --config.train.profile_steps=40,41
    part decode benchmark --suite=decode --shape=gpt2 --dtype=bfloat16 --rows=8 --pairs=3 --out="$out/decode.jsonl"
    part sweep benchmark --suite=sweep --size=2.0 --pairs=1 --out="$out/sweep.jsonl"
fi
finish
