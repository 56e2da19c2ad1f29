#!/usr/bin/env bash
# The Mixtape paper's Transformer for WMT En-De with one of the output layers: stock fairseq-train, all flags below.
# On all visible GPUs, or the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

wmt_options wmt14_en_de data-bin/wmt16_en_de 1024 300000 "$@"
case $layer in # in millions: parameters, and multiplications a token, of which MoS has K in its output layer
  softmax) millions=(209 209) ;;
  mos) millions=(219 481) ;;
  moc) millions=(219 219) ;;
  mixtape) millions=(215 266) ;;
esac
costs "${millions[@]}"

# The architecture has the paper's sizes, dropouts and relative positions, and 9 components for MoS and MoC, 4 for Mixtape.
# Learning rate: the paper's constant 2.5, divided by the root of width times warm-up: 2.5 / sqrt(1024 * 16000).
logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task translation --source-lang en --target-lang de \
  --arch mixtape_transformer_wmt_en_de_big --output-layer "$layer" \
  --criterion output_layer_cross_entropy --label-smoothing 0.1 \
  --optimizer adam --adam-betas '(0.9, 0.997)' --adam-eps 1e-9 --clip-norm 0 \
  --lr 6.176e-4 --lr-scheduler inverse_sqrt --warmup-updates 16000 --warmup-init-lr 0 \
  --max-tokens "$max_tokens" --update-freq "$update_freq" --distributed-world-size "$gpus" --max-update $updates \
  --save-interval-updates $interval --keep-interval-updates $kept --no-epoch-checkpoints \
  --log-format simple --log-interval 100 "${flags[@]+"${flags[@]}"}" "${extra[@]+"${extra[@]}"}"
