#!/usr/bin/env bash
# A small Transformer on Multi30k with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos|moc|mixtape [--data DIR] [--save DIR] [--seed N] [--float32] [flags of fairseq-train, which win over those here]
  --data DIR    what prepare.sh wrote (default: data-bin/multi30k.en-de)
  --save DIR    checkpoints and train.log (default: checkpoints/multi30k.LAYER.seedN)
  --seed N      default: 1
  --float32     on the CPU, no bfloat16 even where the processor has it"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

train_options data-bin/multi30k.en-de "softmax mos moc mixtape" "$@"
seed=${seed:-1}
save=${save:-checkpoints/multi30k.$layer.seed$seed}
compgen -G "$data/dict.*.txt" >/dev/null || die "--data $data holds no binarized data; run prepare.sh first"
case $layer in
  softmax) layer_flags=() ;;
  mos | moc) layer_flags=(--num-components 4) ;;
  # As in the Mixtape paper's translation models; the gate size is not given there.
  mixtape) layer_flags=(--num-components 4 --gate-dim 64 --frequent-ratio 0.5 --gate-noise 0.1 --gate-dropout 0.2) ;;
esac

cpu_precision
logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --arch mixtape_transformer --output-layer "$layer" "${layer_flags[@]+"${layer_flags[@]}"}" \
  --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 \
  --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 \
  --share-all-embeddings --dropout 0.3 \
  --criterion output_layer_cross_entropy --label-smoothing 0.1 \
  --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.005 --lr-scheduler inverse_sqrt --warmup-updates 2000 \
  --max-tokens 4096 --required-batch-size-multiple 1 --max-update 8000 --patience 10 --keep-last-epochs 10 \
  --log-format simple --log-interval 50 "${precision[@]+"${precision[@]}"}" "${extra[@]+"${extra[@]}"}"
