#!/usr/bin/env bash
# AWD-LSTM on the Penn Treebank with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

# A row for each layer: its name, and its flags. Softmax as in AWD-LSTM's README (Merity et al. 2018), MoS as in Yang et al. 2018, whose values MoC
# and Mixtape have, too. --finetune-lr is the learning rate of the second stage, and --seed the papers'.
mos="--seed 28 --lr 20 --finetune-lr 25 --batch-size 12 --max-epoch 1000 --max-segment-length 110"
# Parthiban et al. 2021 average after epoch 200, and train slopes at a learning rate of .02.
monotone="--seed 141 --lr 20 --finetune-lr 20 --batch-size 20 --max-epoch 500 --max-segment-length 110 --averaging-epoch 200"
layers="
softmax  --arch awd_lstm_lm_ptb  --seed 141 --lr 30 --finetune-lr 30 --batch-size 20 --max-epoch 500
mos      --arch awd_lstm_lm_ptb_mos $mos
moc      --arch awd_lstm_lm_ptb_moc $mos
mixtape  --arch awd_lstm_lm_ptb_mixtape $mos
sigsoftmax   --arch awd_lstm_lm_ptb_sigsoftmax $monotone
gss          --arch awd_lstm_lm_ptb_gss $monotone
plif         --arch awd_lstm_lm_ptb_plif $monotone
plif-frozen  --arch awd_lstm_lm_ptb_plif --freeze-plif $monotone"
# With --small: equal parameters, so that a mixture's LSTM is smaller; MoC has the size of MoS. PLIF's slopes come on top.
small_layers="
softmax  --output-layer softmax --embed-dim 140 --hidden-sizes 416,140
mos      --output-layer mos --embed-dim 140 --hidden-sizes 343,200 --num-components 5
moc      --output-layer moc --embed-dim 140 --hidden-sizes 343,200 --num-components 5
mixtape  --output-layer mixtape --embed-dim 140 --hidden-sizes 324,200 --num-components 4 --frequent-ratio 0.1 --gate-weight-norm
sigsoftmax   --output-layer sigsoftmax --embed-dim 140 --hidden-sizes 416,140
gss          --output-layer gss --embed-dim 140 --hidden-sizes 416,140
plif         --output-layer plif --embed-dim 140 --hidden-sizes 416,140
plif-frozen  --output-layer plif --freeze-plif --embed-dim 140 --hidden-sizes 416,140"
plan --example ptb --data data-bin/ptb --options "finetune small long float32" --layers "$layers" --small-layers "$small_layers" -- "$@"

if [ -n "$small" ]; then
  # What docs/results_penn_treebank.md found best by validation for 7.5 and for 30 epochs.
  dropout=0.2 embedding_dropout=0 updates=10000
  if [ -n "$long" ]; then
    dropout=0.25 embedding_dropout=0.1 updates=40000
    case $layer in mos | moc | mixtape) layer_flags+=(--context-dropout 0.2) ;; esac
  fi
  fairseq_train "${lstm[@]}" --tokens-per-sample 35 --arch awd_lstm_lm "${layer_flags[@]}" \
    --context-scale 8 --dropout "$dropout" --input-dropout "$dropout" --hidden-dropout "$dropout" \
    --embedding-dropout "$embedding_dropout" --weight-dropout 0 \
    --optimizer adam --lr 4e-3 --clip-norm 0.25 --lr-scheduler polynomial_decay --warmup-updates 200 \
    --batch-size 20 --max-update "$updates" --total-num-update "$updates"
else
  fairseq_train "${awd_lstm[@]}" "${layer_flags[@]}"
fi
