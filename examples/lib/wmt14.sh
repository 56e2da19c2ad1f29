# The training that wmt14_en_de and wmt14_en_fr share; their train.sh source it, with $root set, and set $layers.

source "$root/examples/lib/training.sh"

# plan_wmt14 EXAMPLE DATA UPDATES ARGUMENT...: as plan; an update is of 8 batches of 4,096 tokens, the paper's batch on 8 replicas (inferred)
plan_wmt14() {
  plan --example "$1" --data "$2" --dictionary 'dict.*.txt' --options "gpus max-tokens bf16 smoke" --layers "$layers" \
    --update-tokens $((8 * 4096)) --updates "$3" --save-interval 2000 --keep 10 -- "${@:4}"
}

train_wmt14() { # train_wmt14 WIDTH FLAG...: fairseq_train with what both have in common, and FLAG...; WIDTH is the model's
  local width=$(($1 / 32)) smaller=()
  # The architecture's shape at 1/32 of its width.
  [ -z "$smoke" ] || smaller=(--cpu --num-workers 0 --log-interval 1 --gate-dim 8 --max-relative-position 4
    --encoder-embed-dim "$width" --encoder-ffn-embed-dim $((4 * width)) --encoder-layers 2 --encoder-attention-heads 4
    --decoder-layers 2 --decoder-attention-heads 4)
  fairseq_train --task translation --source-lang en "${@:2}" "${layer_flags[@]}" \
    --criterion output_layer_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.997)' --adam-eps 1e-9 --clip-norm 0 \
    --lr-scheduler inverse_sqrt --warmup-updates 16000 --warmup-init-lr 0 \
    --max-tokens "$max_tokens" --update-freq "$update_freq" --distributed-world-size "$gpus" --max-update "$updates" \
    --save-interval-updates "$interval" --keep-interval-updates "$kept" --no-epoch-checkpoints \
    --log-format simple --log-interval 100 "${smaller[@]+"${smaller[@]}"}"
}
