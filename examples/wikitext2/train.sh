#!/usr/bin/env bash
# AWD-LSTM on WikiText-2 with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos|moc|mixtape [--finetune] [--data DIR] [--save DIR] [--seed N] [flags of fairseq-train, which win over those here]
  --finetune    the second stage, after the first has ended: averaged SGD from its best weights, into DIR/finetuned
  --data DIR    what prepare.sh wrote (default: data-bin/wikitext2)
  --save DIR    checkpoints and train.log (default: checkpoints/wikitext2.LAYER.seedN)
  --seed N      default: 1882, as in the papers"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

train_options data-bin/wikitext2 "softmax mos moc mixtape" "$@"
case $layer in
  # Merity et al. 2018
  softmax) arch=awd_lstm_lm_wikitext2 lr=30 finetune_lr=30 batch=80 epochs=750 segments=() ;;
  # Yang et al. 2018; MoC and Mixtape with the values of MoS
  *) arch=awd_lstm_lm_wikitext2_$layer lr=15 finetune_lr=20 batch=15 epochs=1000 segments=(--small-batch-size 5 --max-segment-length 90) ;;
esac
seed=${seed:-1882}
save=${save:-checkpoints/wikitext2.$layer.seed$seed}
[ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
two_stages "$lr" "$finetune_lr"

logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task bptt_language_modeling --tokens-per-sample 70 "${segments[@]+"${segments[@]}"}" \
  --arch "$arch" --criterion awd_lstm_cross_entropy --ar-alpha 2 --tar-beta 1 \
  --optimizer nt_asgd --weight-decay 1.2e-6 --clip-norm 0.25 "${stage[@]}" \
  --batch-size "$batch" --batch-size-valid 10 --max-epoch "$epochs" --no-epoch-checkpoints \
  --log-format simple --log-interval 200 "${extra[@]+"${extra[@]}"}"
