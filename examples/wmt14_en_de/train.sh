#!/usr/bin/env bash
# The Mixtape paper's Transformer for WMT En-De with one of the output layers: stock fairseq-train; --print prints all of it.
# On all visible GPUs, or the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/wmt14.sh"

# A row for each layer: its name, and its flags. For the estimate of what the training needs, in millions: the parameters of the
# model, and its multiplications a token, of which MoS has K in its output layer.
layers="
softmax  --output-layer softmax  --parameters 209 --multiplications 209
mos      --output-layer mos      --parameters 219 --multiplications 481
moc      --output-layer moc      --parameters 219 --multiplications 219
mixtape  --output-layer mixtape  --parameters 215 --multiplications 266"
plan_wmt14 wmt14_en_de data-bin/wmt14_en_de 300000 "$@"

# The architecture has the paper's sizes, dropouts and relative positions, and 9 components for MoS and MoC, 4 for Mixtape.
# Learning rate: the paper's constant 2.5, divided by the root of width times warm-up: 2.5 / sqrt(1024 * 16000).
train_wmt14 1024 --target-lang de --arch mixtape_transformer_wmt_en_de_big --lr 6.176e-4
