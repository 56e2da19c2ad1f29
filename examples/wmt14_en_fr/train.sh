#!/usr/bin/env bash
# The Mixtape paper's Transformer for WMT En-Fr with one of the output layers: stock fairseq-train; --print prints all of it.
# On all visible GPUs, or the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/wmt14.sh"

# A row for each layer: its name, and its flags. For the estimate of what the training needs, in millions: the parameters of the
# model, and its multiplications a token, of which MoS has K in its output layer.
layers="
softmax  --output-layer softmax  --parameters 771 --multiplications 771
mos      --output-layer mos      --parameters 809 --multiplications 1333
moc      --output-layer moc      --parameters 809 --multiplications 809
mixtape  --output-layer mixtape  --parameters 789 --multiplications 889"
plan_wmt14 wmt14_en_fr data-bin/wmt14_en_fr 1200000 "$@"

# The architecture has the paper's sizes, dropouts and relative positions, and 9 components for MoS and MoC, 4 for Mixtape.
# Learning rate: the paper's constant 2.0, divided by the root of width times warm-up: 2.0 / sqrt(2048 * 16000).
train_wmt14 2048 --target-lang fr --arch mixtape_transformer_wmt_en_fr_big --lr 3.494e-4
