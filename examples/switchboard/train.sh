#!/usr/bin/env bash
# A dialog Seq2Seq on Switchboard with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos|moc|mixtape [--data DIR] [--save DIR] [--seed N] [--float32] [flags of fairseq-train, which win over those here]
  --data DIR    what prepare.sh wrote (default: data-bin/switchboard)
  --save DIR    checkpoints and train.log (default: checkpoints/switchboard.LAYER.seedN)
  --seed N      default: 1
  --float32     on the CPU, no bfloat16 even where the processor has it"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/training.sh"

train_options data-bin/switchboard "softmax mos moc mixtape" "$@"
seed=${seed:-1}
save=${save:-checkpoints/switchboard.$layer.seed$seed}
[ -f "$data/dict.response.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
# Of about as many parameters: 10.0 million with softmax, whose embedding is as wide as the decoder, else 10.25 million.
case $layer in
  softmax) layer_flags=() ;;
  mos | moc) layer_flags=(--num-components 10 --output-embed-dim 300) ;;
  mixtape) layer_flags=(--num-components 4 --output-embed-dim 350 --gate-dim 64 --frequent-ratio 0.1) ;;
esac

cpu_precision
# The MoS paper gives no settings: these are Zhao et al.'s, whose loss is a mean over responses (--sentence-avg).
logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task translation --source-lang context --target-lang response \
  --arch dialog_seq2seq --output-layer "$layer" "${layer_flags[@]+"${layer_flags[@]}"}" \
  --criterion output_layer_cross_entropy --sentence-avg \
  --optimizer adam --lr 1e-3 --clip-norm 5 --batch-size 30 --required-batch-size-multiple 1 \
  --max-epoch 60 --patience 5 --no-epoch-checkpoints \
  --log-format simple --log-interval 500 "${precision[@]+"${precision[@]}"}" "${extra[@]+"${extra[@]}"}"
