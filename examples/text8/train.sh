#!/usr/bin/env bash
# A 1-layer character LSTM on text8 with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos7|mos10 [--data DIR] [--save DIR] [--seed N] [flags of fairseq-train, which win over those here]
  --data DIR    what prepare.sh wrote (default: data-bin/text8)
  --save DIR    checkpoints and train.log (default: checkpoints/text8.LAYER.seedN)
  --seed N      default: 1"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

train_options data-bin/text8 "softmax mos7 mos10" "$@"
case $layer in softmax) arch=awd_lstm_lm_text8 ;; *) arch=awd_lstm_lm_text8_$layer ;; esac
seed=${seed:-1}
save=${save:-checkpoints/text8.$layer.seed$seed}
[ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"

# The paper gives the network and that it has no dropout. Optimizer, batch, segment length and epochs are ours.
logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task bptt_language_modeling --remove-eos --tokens-per-sample 150 --segment-length-std 0 --short-segment-probability 0 \
  --arch "$arch" --criterion awd_lstm_cross_entropy --ar-alpha 0 --tar-beta 0 --report-bpc \
  --optimizer adam --lr 2e-3 --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5 --clip-norm 1 \
  --batch-size 128 --batch-size-valid 10 --max-epoch 20 --no-epoch-checkpoints \
  --log-format simple --log-interval 200 "${extra[@]+"${extra[@]}"}"
