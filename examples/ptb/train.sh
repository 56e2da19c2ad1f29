#!/usr/bin/env bash
# AWD-LSTM on the Penn Treebank with one of the output layers: stock fairseq-train, all flags below.
# On a GPU where there is one, else on the CPU. A rerun with the same --save goes on from its last checkpoint.
set -euo pipefail

usage="usage: train.sh softmax|mos|moc|mixtape [--finetune] [--small] [--float32] [--data DIR] [--save DIR] [--seed N] [flags of fairseq-train, which win over those here]
  --finetune    the second stage, after the first has ended: averaged SGD from its best weights, into DIR/finetuned
  --small       an LSTM of 2.65 million parameters with Adam, for a CPU
  --float32     on the CPU, no bfloat16 even where the processor has it
  --data DIR    what prepare.sh wrote (default: data-bin/ptb)
  --save DIR    checkpoints and train.log (default: checkpoints/ptb.LAYER.seedN)
  --seed N      default: 141 for softmax, else 28, as in the papers"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/training.sh"

train_options data-bin/ptb "softmax mos moc mixtape" "$@"
case $layer in
  # Merity et al. 2018
  softmax) arch=awd_lstm_lm_ptb lr=30 finetune_lr=30 batch=20 default_seed=141 epochs=500 segments=() ;;
  # Yang et al. 2018; MoC and Mixtape with the values of MoS
  *) arch=awd_lstm_lm_ptb_$layer lr=20 finetune_lr=25 batch=12 default_seed=28 epochs=1000 segments=(--max-segment-length 110) ;;
esac
[ -z "$small" ] || default_seed=1
seed=${seed:-$default_seed}
save=${save:-checkpoints/ptb${small:+.small}.$layer.seed$seed}
[ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
two_stages "$lr" "$finetune_lr"
cpu_precision

if [ -n "$small" ]; then
  [ -z "$finetune" ] || die "--small has no second stage"
  # Equal parameters, so that a mixture's embedding is narrower; MoC has the size of MoS.
  case $layer in
    softmax) sizes=(--embed-dim 200 --hidden-sizes 200,200) ;;
    mos | moc) sizes=(--embed-dim 140 --hidden-sizes 343,200 --num-components 5) ;;
    mixtape) sizes=(--embed-dim 140 --hidden-sizes 324,200 --num-components 4 --frequent-ratio 0.1 --gate-weight-norm) ;;
  esac
  logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
    --task bptt_language_modeling --tokens-per-sample 35 --segment-length-std 0 --short-segment-probability 0 \
    --arch awd_lstm_lm --output-layer "$layer" "${sizes[@]}" \
    --dropout 0.2 --input-dropout 0.2 --hidden-dropout 0.2 --embedding-dropout 0 --weight-dropout 0 \
    --criterion awd_lstm_cross_entropy --ar-alpha 0 --tar-beta 0 \
    --optimizer adam --lr 2e-3 --clip-norm 0.25 --lr-scheduler polynomial_decay --warmup-updates 200 --total-num-update 20000 \
    --batch-size 20 --batch-size-valid 10 --max-update 20000 --no-epoch-checkpoints \
    --log-format simple --log-interval 200 "${precision[@]+"${precision[@]}"}" "${extra[@]+"${extra[@]}"}"
  exit
fi

logged fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
  --task bptt_language_modeling --tokens-per-sample 70 "${segments[@]+"${segments[@]}"}" \
  --arch "$arch" --criterion awd_lstm_cross_entropy --ar-alpha 2 --tar-beta 1 \
  --optimizer nt_asgd --weight-decay 1.2e-6 --clip-norm 0.25 "${stage[@]}" \
  --batch-size "$batch" --batch-size-valid 10 --max-epoch "$epochs" --no-epoch-checkpoints \
  --log-format simple --log-interval 200 "${precision[@]+"${precision[@]}"}" "${extra[@]+"${extra[@]}"}"
