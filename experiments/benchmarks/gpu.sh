#!/usr/bin/env bash
# GPT-2 on one GPU, ours beside transformers on torch (eager and compiled, flash attention): 124M, 350M and 1.5B in
# bfloat16, and attention alone. One command, in an environment with `pip install -e '.[cuda,peers]'`:
#
#     experiments/benchmarks/gpu.sh runs/gpu
#
# The rows fit an H200 (139 GiB) with both frameworks in memory; for smaller GPUs: ROWS="8 4 1".
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?folder for the records}
mkdir -p "$out"
read -r -a rows <<<"${ROWS:-32 16 8}"
shapes=(gpt2 gpt2_350m gpt2_1_5b)
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
for i in 0 1 2; do
    python -m experiments.benchmark --suite=train --shape="${shapes[i]}" --dtype=bfloat16 --rows="${rows[i]}" \
        --pairs=5 --out="$out/train.jsonl" | tee -a "$out/train.txt"
done
for tokens in 1024 4096 16384; do
    python -m experiments.benchmark --suite=attention --dtype=bfloat16 --tokens="$tokens" --out="$out/attention.jsonl" |
        tee -a "$out/attention.txt"
done
