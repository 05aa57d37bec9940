#!/usr/bin/env bash
# The figures of one GPU in one JSON, in at most ten minutes: exactness, latency tables of the
# bundled target and of a large body with random weights, throughput, share of the device's peak.
#
#   spot_batch/lab/bench/gpu.sh OUT.json [--device cuda] [--model bundled] [--prompts 64] ...
#
# The options and what they are unless given stand below. Fails where a canonical output differs.
set -euo pipefail

declare -A given=(
  [device]=cuda
  [model]=bundled
  [drafter]=auto
  [large]=JetLM/SDAR-8B-Chat-b32 # its shape alone: nothing is fetched
  [prompts]=64
  [tokens]=64
  [flights]=1,16                 # samples in flight that exactness is tried at
  [sequences]=1,4,16,64          # and throughput
  [slots]=256                    # of the largest forward
  [seconds]=30                   # for a latency table
  [passes]=8
  [turn]=1.0
)
out=${1:?usage: gpu.sh OUT.json [--NAME VALUE]...}
shift
while (($#)); do
  name=${1#--}
  [[ -v given[$name] ]] || { echo "gpu.sh: no option $1; there are: ${!given[*]}" >&2; exit 2; }
  given[$name]=${2:?gpu.sh: $1 wants a value}
  shift 2
done

bench() { spot-batch bench "$@" --device "${given[device]}"; }
model=(--model "${given[model]}" --drafter "${given[drafter]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

status=0
bench exact "${model[@]}" --limit "${given[prompts]}" --max-new-tokens "${given[tokens]}" \
  --temperatures 0,1 --budgets 8 --gammas 0.1 --sequences "${given[flights]}" \
  --numerics canonical --json "$folder/exact.json" || { status=$? && [[ -s "$folder/exact.json" ]]; }
bench latency "${model[@]}" --max-slots "${given[slots]}" --seconds "${given[seconds]}" \
  --json "$folder/latency.json"
bench latency --model "${given[large]}" --drafter ranking --random-weights \
  --max-slots "${given[slots]}" --seconds "${given[seconds]}" --json "$folder/latency-large.json"
bench throughput "${model[@]}" --limit "${given[prompts]}" --max-new-tokens "${given[tokens]}" \
  --sequences "${given[sequences]}" --budgets 8,auto --gammas 0.1 --passes "${given[passes]}" \
  --turn-seconds "${given[turn]}" --plain-passes 0 --table "$folder/latency.json" \
  --json "$folder/throughput.json"
python -m spot_batch.lab.bench.gpu "$folder" "$out" --model "${given[model]}" \
  --large "${given[large]}" --device "${given[device]}"
exit "$status"
