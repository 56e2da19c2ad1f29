#!/usr/bin/env bash
# A small Transformer on Multi30k with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

# A row for each layer: its name, and its flags. Mixtape as in the Mixtape paper's translation models, but for the gate's size,
# which is not given there. Mixtures have a learned scale of their contexts, without which MoC and Mixtape learn far more slowly
# (softmax gains nothing from one in the end), and a dropout of these, without which they are behind softmax after 60 epochs
# (docs/results_multi30k.md).
mixture="--num-components 4 --context-scale 4 --context-dropout 0.2"
layers="
softmax  --output-layer softmax
mos      --output-layer mos $mixture
moc      --output-layer moc $mixture
mixtape  --output-layer mixtape $mixture --gate-dim 64 --frequent-ratio 0.5 --gate-noise 0.1 --gate-dropout 0.2"
plan --example multi30k --data data-bin/multi30k.en-de --dictionary 'dict.*.txt' --options "short float32" --layers "$layers" -- "$@"

dropout=0.3 schedule=(--lr-scheduler inverse_sqrt --warmup-updates 2000)
if [ -n "$short" ]; then
  # In docs/results_multi30k.md, what mixtures gain with.
  dropout=0.2 schedule=(--context-scale 4 --lr-scheduler polynomial_decay --warmup-updates 1000 --total-num-update 3780 --max-epoch 30)
fi

# On a CPU oneDNN compiles each product in bfloat16 for each shape of a batch, at first 23 (softmax) to 39 (Mixtape) an update,
# and would keep 1,024 of them; an epoch has 126 updates.
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=${ONEDNN_PRIMITIVE_CACHE_CAPACITY-8192}
fairseq_train --arch mixtape_transformer "${layer_flags[@]}" \
  --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 \
  --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 \
  --share-all-embeddings --dropout "$dropout" \
  --criterion output_layer_cross_entropy --label-smoothing 0.1 \
  --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.005 "${schedule[@]}" \
  --max-tokens 4096 --required-batch-size-multiple 1 --max-update 8000 --patience 10 --keep-last-epochs 10 \
  --log-format simple --log-interval 50
