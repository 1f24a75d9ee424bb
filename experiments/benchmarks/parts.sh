# shellcheck shell=bash
# What gpu.sh and tpu.sh share: parts that are done once, and a page written from their records after each. Both set
# `out`, the folder, before they read this.
out=${out:?}
failed=0

finish() { exit "$failed"; }

part() { # NAME COMMAND...: runs it unless it is done
    local name=$1 began=$SECONDS
    shift
    [ -e "$out/$name.done" ] && return
    echo "== $name"
    if "$@" > >(tee "$out/$name.txt") 2> >(tee "$out/$name.err" >&2); then
        echo "$((SECONDS - began)) s" >"$out/$name.done"
    else
        failed=1
        echo "== $name failed; see $out/$name.err" >&2
    fi
    python -m experiments.gpu_page "$out"
}

# shellcheck disable=SC2329 # `part` calls these two
benchmark() { python -m experiments.benchmark "$@"; }

# shellcheck disable=SC2329
pretraining() { # NAME OPTIONS...: a whole run
    local name=$1
    shift
    python -m experiments.pretrain --config.workdir="$out/runs/$name" --log "$@" &&
        cp "$out/runs/$name/records.jsonl" "$out/$name.jsonl"
}
