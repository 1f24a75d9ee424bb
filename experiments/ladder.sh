#!/usr/bin/env bash
# The sizes of a study side by side, each in a process of its own, for so many seconds: on a GPU, of which a small model
# alone uses little, or on a machine of many cores.
#
#     experiments/ladder.sh FOLDER SECONDS WIDTH,... CONFIG FLAGS...
#     experiments/ladder.sh runs/ladder 3600 32,48,64 scaling_three_decades --config.data.files='books/*.txt.xz'
#
# Each size trains in FOLDER/WIDTH, where the same command goes on with it. After so many seconds, or at Ctrl-C, each
# process ends with the dispatch that it is at, and what it had made of a run since its last branch is lost. FOLDER/study
# gets what all have finished; `jaxformer scaling CONFIG FLAGS... --config.workdir=FOLDER/study` goes on from there. Sizes
# that do not search their rate (ladder.searched_sizes) are left to it. Exit code: 0 all done, 75 stopped, 1 one failed.
set -uo pipefail
say() { echo "$*" >&2; }
[ $# -ge 4 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
out=$1 seconds=$2 config=$4
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { say "SECONDS: $seconds; accepted: a whole number from 1 on" && exit 2; }
[[ $3 =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || { say "WIDTH,...: $3; accepted: widths with commas between, as 64,128" && exit 2; }
IFS=, read -r -a widths <<<"$3"
[ -z "$(printf '%s\n' "${widths[@]}" | sort | uniq -d)" ] || { say "WIDTH,...: $3; accepted: each once" && exit 2; }
shift 4
for flag in "$@"; do
    case $flag in --stage* | --only* | --config.workdir*) say "FLAGS: $flag; this program sets it" && exit 2 ;; esac
done
# One card, or one machine's cores, for all of them.
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false} JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:-1}

mkdir -p "$out" || exit 1
stop=
trap 'stop=1' INT TERM
processes=()
for width in "${widths[@]}"; do
    python -m jaxformer scaling "$config" "$@" --stage=run --only="$width" --config.workdir="$out/$width" \
        >"$out/$width.txt" 2>&1 &
    processes+=($!)
done
end=$((SECONDS + seconds))
while [ -z "$stop" ] && [ "$SECONDS" -lt "$end" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done
# shellcheck disable=SC2046 # one word for each process
kill -TERM $(jobs -rp) 2>/dev/null
result=0
for i in "${!widths[@]}"; do
    while kill -0 "${processes[i]}" 2>/dev/null; do wait "${processes[i]}"; done # a signal ends a wait
    wait "${processes[i]}"
    case $? in
        0) ;;
        75 | 143) [ "$result" -eq 1 ] || result=75 ;; # 143: before it had begun
        *) result=1 && say "width ${widths[i]} failed; see $out/${widths[i]}.txt" ;;
    esac
done

named() { grep -m1 '^ "fingerprint"' "$1/manifest.json"; }
study=$out/study
for width in "${widths[@]}"; do
    [ -e "$out/$width/manifest.json" ] || continue
    mkdir -p "$study/runs"
    [ -e "$study/manifest.json" ] || cp "$out/$width/manifest.json" "$study/"
    if [ "$(named "$out/$width")" = "$(named "$study")" ]; then
        find "$out/$width/runs" -name '*.jsonl' -exec cp {} "$study/runs/" \;
    else
        result=1 && say "$study holds runs of another config or text than $out/$width; give them a FOLDER of their own"
    fi
done
echo "$(find "$study/runs" -name '*.jsonl' 2>/dev/null | wc -l) runs in $study"
exit "$result"
