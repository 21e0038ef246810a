#!/usr/bin/env bash
# Everything that needs a GPU, into the folder OUT: the tests that are marked gpu, then each benchmark, a log for each.
#   benchmarks/gpu.sh OUT [tests] [kernels] [gemms] [training] [files] [several]     (no part named: all)
# About 20 minutes on one H200; `several` needs two GPUs, `rl` (named only) some five minutes on two.
set -uo pipefail
out=$1; shift
parts=${*:-tests kernels gemms training files several}
cd "$(dirname "$0")/.."
mkdir -p "$out"

run() { # NAME SECONDS COMMAND...: a log, its last lines, and how long it took
    local name=$1 limit=$2 start=$SECONDS; shift 2
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - start)) s"; tail -n 3 "$out/$name.log"
}
bench() { local name=$1 limit=$2; shift 2; run "$name" "$limit" python3 -W ignore -m benchmarks run "$name" --out "$out/$name" "$@"; }

for part in $parts; do
    case $part in
        tests) run tests 300 python3 -m pytest -q -n 14 -m gpu -p no:cacheprovider tests ;;
        kernels) bench quantize 120; bench activation 120 --rounds 3 ;;
        gemms) bench matmul 300; bench engine 300 ;;
        training) bench training 300 --rounds 5 ;;
        files) bench export-gpu 120 ;;
        several)
            bench multi-gpu 240 --rounds 3 --syncs 5
            run syncs 90 python3 -W ignore -m benchmarks run multi-gpu --layers 2 --experts 16 --no-training --syncs 50 --out "$out/syncs"
            ;;
        rl)
            bench rl 150 --seeds 1 --steps 100 --arms quads-batch --masters --log "$out/rl-batch.jsonl"
            run rl-split 60 python3 -m benchmarks run rl --seeds 1 --steps 20 --arms quads --split --masters --log "$out/rl-split.jsonl"
            run rl-ablations 240 python3 -m benchmarks run rl --study ablations,stress --seeds 1 --steps 40 --masters --log "$out/rl-ablations.jsonl"
            ;;
        *) echo "unknown part $part"; exit 2 ;;
    esac
done
