#!/usr/bin/env bash
# The sizes of a study side by side, each in a process of its own, for at most so many seconds: on a GPU, where a small
# model alone leaves most of the card unused, or on a machine of many cores.
#
#     experiments/ladder.sh FOLDER SECONDS WIDTH,... CONFIG FLAGS...
#     experiments/ladder.sh runs/ladder 3600 32,48,64 scaling_three_decades --config.data.files='books/*.txt.xz'
#
# FOLDER/WIDTH is where each size trains, and where the same command goes on with it; FOLDER/study holds what all of them
# have finished, and the command without --only goes on from there: `jaxformer scaling CONFIG --config.workdir=FOLDER/study`.
set -uo pipefail
[ $# -ge 4 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
out=$1 seconds=$2 config=$4
IFS=, read -r -a widths <<<"$3"
shift 4
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "SECONDS: $seconds; accepted: a whole number from 1 on" >&2 && exit 2; }
mkdir -p "$out"
processes=()
for width in "${widths[@]}"; do
    python -m jaxformer scaling "$config" --stage=run --only="$width" "$@" --config.workdir="$out/$width" \
        >"$out/$width.txt" 2>&1 &
    processes+=($!)
done
end=$((SECONDS + seconds))
while [ "$SECONDS" -lt "$end" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done
# shellcheck disable=SC2046 # one word for each process
kill -TERM $(jobs -rp) 2>/dev/null # they end after the update they are at
failed=0
for i in "${!widths[@]}"; do
    wait "${processes[i]}"
    code=$?
    case $code in
        0 | 75 | 143) ;; # done; stopped; stopped before it had begun
        *) failed=1 && echo "width ${widths[i]}: exit code $code; see $out/${widths[i]}.txt" >&2 ;;
    esac
done
mkdir -p "$out/study/runs"
for width in "${widths[@]}"; do
    [ -e "$out/$width/manifest.json" ] || continue
    [ -e "$out/study/manifest.json" ] || cp "$out/$width/manifest.json" "$out/study/"
    find "$out/$width/runs" -name '*.jsonl' -exec cp {} "$out/study/runs/" \;
done
echo "$(find "$out/study/runs" -name '*.jsonl' | wc -l) runs in $out/study"
exit "$failed"
