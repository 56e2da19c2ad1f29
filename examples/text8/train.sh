#!/usr/bin/env bash
# A 1-layer character LSTM on text8 with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

layers="
softmax  --arch awd_lstm_lm_text8
mos7     --arch awd_lstm_lm_text8_mos7
mos10    --arch awd_lstm_lm_text8_mos10"
plan --example text8 --data data-bin/text8 --options float32 --layers "$layers" -- "$@"

# The paper gives the network. No dropout, optimizer, batch, segment length and epochs are ours.
fairseq_train "${lstm[@]}" --remove-eos --report-bpc --tokens-per-sample 150 "${layer_flags[@]}" \
  --optimizer adam --lr 2e-3 --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5 --clip-norm 1 \
  --batch-size 128 --max-epoch 20
