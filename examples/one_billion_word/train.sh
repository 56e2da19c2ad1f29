#!/usr/bin/env bash
# A 2-layer LSTM on One Billion Word with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

layers="
softmax  --arch awd_lstm_lm_one_billion
mos      --arch awd_lstm_lm_one_billion_mos
mixtape  --arch awd_lstm_lm_one_billion_mixtape"
plan --example one_billion_word --data data-bin/one_billion_word --dictionary shard00/dict.txt --layers "$layers" -- "$@"

shards=("$data"/shard*)
[ -z "$print" ] || [ -d "$data/shard00" ] || shards=("$data"/shard{00..98}) # those of prepare.sh
for shard in "${shards[@]}"; do [ -n "$print" ] || [ -f "$shard/dict.txt" ] || die "$shard is not whole; run prepare.sh again"; done
data=$(IFS=:; echo "${shards[*]}")

# fairseq takes one shard an epoch, and validates after it. A pass over the text is ${#shards[@]} epochs, so that averaging
# begins when validation is worse than it was at some point more than a pass ago.
passes=5
fairseq_train "${lstm[@]}" --tokens-per-sample 35 "${layer_flags[@]}" \
  --optimizer nt_asgd --nonmono "${#shards[@]}" --lr 20 --clip-norm 0.25 \
  --batch-size 60 --max-epoch $((passes * ${#shards[@]}))
