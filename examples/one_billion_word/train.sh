#!/usr/bin/env bash
# A 2-layer LSTM on One Billion Word with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos|mixtape [--data DIR] [--save DIR] [--seed N] [flags of fairseq-train, which win over those here]
  --data DIR    what prepare.sh wrote (default: data-bin/one_billion_word)
  --save DIR    checkpoints and train.log (default: checkpoints/one_billion_word.LAYER.seedN)
  --seed N      default: 1"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

train_options data-bin/one_billion_word "softmax mos mixtape" "$@"
case $layer in softmax) arch=awd_lstm_lm_one_billion ;; *) arch=awd_lstm_lm_one_billion_$layer ;; esac
seed=${seed:-1}
save=${save:-checkpoints/one_billion_word.$layer.seed$seed}
shards=("$data"/shard*)
[ -f "$data/shard00/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
for shard in "${shards[@]}"; do [ -f "$shard/dict.txt" ] || die "$shard is not whole; run prepare.sh again"; done

# fairseq takes one shard an epoch, and validates after it. A pass over the text is ${#shards[@]} epochs, so that averaging
# begins when validation is worse than it was at some point more than a pass ago.
passes=5
logged fairseq-train "$(IFS=:; echo "${shards[*]}")" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task bptt_language_modeling --tokens-per-sample 35 --segment-length-std 0 --short-segment-probability 0 \
  --arch "$arch" --criterion awd_lstm_cross_entropy --ar-alpha 0 --tar-beta 0 \
  --optimizer nt_asgd --nonmono "${#shards[@]}" --lr 20 --clip-norm 0.25 \
  --batch-size 60 --batch-size-valid 10 --max-epoch $((passes * ${#shards[@]})) --no-epoch-checkpoints \
  --log-format simple --log-interval 200 "${extra[@]+"${extra[@]}"}"
