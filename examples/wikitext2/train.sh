#!/usr/bin/env bash
# AWD-LSTM on WikiText-2 with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

# A row for each layer: its name, and its flags. Softmax as in AWD-LSTM's README (Merity et al. 2018), MoS as in Yang et al. 2018, whose values MoC
# and Mixtape have, too. --finetune-lr is the learning rate of the second stage, and --seed the papers'.
mos="--seed 1882 --lr 15 --finetune-lr 20 --batch-size 15 --small-batch-size 5 --max-epoch 1000 --max-segment-length 90"
# Parthiban et al. 2021 average after epoch 200, and train slopes at a learning rate of .02.
monotone="--seed 1881 --lr 30 --finetune-lr 30 --batch-size 80 --max-epoch 750 --max-segment-length 110 --averaging-epoch 200"
layers="
softmax  --arch awd_lstm_lm_wikitext2  --seed 1882 --lr 30 --finetune-lr 30 --batch-size 80 --max-epoch 750
mos      --arch awd_lstm_lm_wikitext2_mos $mos
moc      --arch awd_lstm_lm_wikitext2_moc $mos
mixtape  --arch awd_lstm_lm_wikitext2_mixtape $mos
sigsoftmax   --arch awd_lstm_lm_wikitext2_sigsoftmax $monotone
gss          --arch awd_lstm_lm_wikitext2_gss $monotone
plif         --arch awd_lstm_lm_wikitext2_plif $monotone
plif-frozen  --arch awd_lstm_lm_wikitext2_plif --freeze-plif $monotone"
plan --example wikitext2 --data data-bin/wikitext2 --options "finetune float32" --layers "$layers" -- "$@"

fairseq_train "${awd_lstm[@]}" "${layer_flags[@]}"
