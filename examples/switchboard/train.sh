#!/usr/bin/env bash
# A dialog Seq2Seq on Switchboard with one of the output layers: stock fairseq-train; --print prints all of it.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

# A row for each layer: its name, and its flags. Of about as many parameters: 10.0 million with softmax, whose embedding is as wide as
# the decoder, else 10.25 million.
layers="
softmax  --output-layer softmax
mos      --output-layer mos --num-components 10 --output-embed-dim 300
moc      --output-layer moc --num-components 10 --output-embed-dim 300
mixtape  --output-layer mixtape --num-components 4 --output-embed-dim 350 --gate-dim 64 --frequent-ratio 0.1"
# With --small: 3.43 to 3.44 million parameters.
small_layers="
softmax  --output-layer softmax
mos      --output-layer mos --num-components 10 --output-embed-dim 166
moc      --output-layer moc --num-components 10 --output-embed-dim 166
mixtape  --output-layer mixtape --num-components 4 --output-embed-dim 175 --gate-dim 64 --frequent-ratio 0.1"
plan --example switchboard --data data-bin/switchboard --dictionary dict.response.txt --options "small float32" \
  --layers "$layers" --small-layers "$small_layers" -- "$@"
# The MoS paper gives no settings: these are Zhao et al.'s, whose loss is a mean over responses (--sentence-avg);
# what --small changes of them is ours.
sizes=()
schedule=(--lr 1e-3 --max-epoch 60 --patience 5)
if [ -n "$small" ]; then
  sizes=(--embed-dim 100 --utterance-hidden-size 75 --context-hidden-size 150 --decoder-hidden-size 200 --context-scale 4 --dropout 0.2)
  schedule=(--lr 3e-3 --lr-scheduler polynomial_decay --total-num-update 18000 --max-update 18000)
fi

fairseq_train --task translation --source-lang context --target-lang response \
  --arch dialog_seq2seq "${sizes[@]+"${sizes[@]}"}" "${layer_flags[@]}" \
  --criterion output_layer_cross_entropy --sentence-avg \
  --optimizer adam "${schedule[@]}" --clip-norm 5 --batch-size 30 --required-batch-size-multiple 1 \
  --no-epoch-checkpoints \
  --log-format simple --log-interval 500
