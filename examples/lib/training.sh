# What train.sh and evaluate.sh of all examples share; they source it, with $root set and, except in the two WMT examples, $usage.

source "$root/examples/lib/recipes.sh"

# -------------------------------------------------------------------------------------------------------- options

# take_options ARGUMENT...: "[--max-tokens N]" in the first line of $usage makes --max-tokens set $max_tokens, and "[--bf16]"
# makes --bf16 set $bf16 to 1; the rest is $extra
take_options() {
  local first=${usage%%$'\n'*} name
  extra=()
  while [ $# -gt 0 ]; do
    name=${1#--} name=${name//-/_}
    if [ "$1" = -h ] || [ "$1" = --help ]; then
      echo "$usage"
      exit
    elif [[ $1 = --* && $first = *"[$1 "* ]]; then
      [ $# -gt 1 ] || die "$1 needs a value; see ${0##*/} --help"
      printf -v "$name" %s "$2"
      shift
    elif [[ $1 = --* && $first = *"[$1]"* ]]; then
      printf -v "$name" 1
    else
      extra+=("$1")
    fi
    shift
  done
}

# train_options DATA "LAYER..." ARGUMENT...: $layer, and $data $save $seed … $extra as in take_options; DATA is the default of $data
train_options() {
  local layers=$2 found
  data=$1 save="" seed="" finetune="" gpus="" max_tokens="" bf16="" float32="" small="" smoke="" layer=""
  shift 2
  command=$(printf ' %q' "${0#"$root/"}" "$@") command=${command# }
  case ${1-} in -h | --help) echo "$usage"; exit ;; esac
  for found in $layers; do [ "$found" != "${1-}" ] || layer=$found; done
  found=${layers// /, }
  [ -n "$layer" ] || die "the output layer is '${1-}', allowed are ${found%, *} and ${found##*, }; see train.sh --help"
  shift
  take_options "$@"
}

evaluate_options() { # evaluate_options DATA ARGUMENT...: $save, and $data … $extra as in take_options; DATA is the default of $data
  data=$1 dynamic="" cache="" cpu="" last="" test_set="" references="" max_tokens=""
  shift
  case ${1-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
  save=$1
  shift
  take_options "$@"
  [ -d "$save" ] || die "$save is no folder"
}

no_more() { # no_more ARGUMENT...: refuses what no option took
  [ $# = 0 ] || die "unknown option $1; see ${0##*/} --help"
}

# ------------------------------------------------------------------------------------------------------- train.sh

logged() { # logged COMMAND...: on the terminal and in $save/train.log, after a line with this repository's commit and train.sh's command
  local log=$save/train.log
  command -v "$1" >/dev/null || die "$1 is not installed; scripts/setup.sh sets up all that is needed"
  mkdir -p "$save"
  [ "${SLURM_PROCID:-0}" = 0 ] || log=/dev/null # of several tasks of srun the first keeps the log
  { echo "train.sh: commit $(commit), command $command"; "$@"; } 2>&1 | tee -a "$log"
}

commit() { # with "+" where files differ from it
  local hash
  if [ -e "$root/.git" ] && hash=$(git -C "$root" rev-parse --short HEAD 2>/dev/null); then
    git -C "$root" diff --quiet HEAD 2>/dev/null || hash+=+
    echo "$hash"
  else
    echo unknown
  fi
}

on_cpu() { [ -n "$smoke" ] || [[ " ${extra[*]-} " = *" --cpu "* ]]; }

count_gpus() { # $gpus, where --gpus did not give it: those that fairseq will use; $has_gpu is empty where it trains on the CPU
  local visible
  has_gpu=""
  [ -z "$gpus" ] || positive --gpus "$gpus"
  if on_cpu; then
    [ "${gpus:-1}" = 1 ] || die "--gpus is $gpus, and training on the CPU uses none"
    gpus=1
    return
  fi
  visible=$(python -c 'import torch; print(torch.cuda.device_count())') || die "torch is not installed; scripts/setup.sh sets up all that is needed"
  # Under srun, as many on each node of the step; fairseq would wait for ever for more.
  [ -z "${SLURM_STEP_NODELIST-}" ] || visible=$((visible * ${SLURM_NNODES:-1}))
  if [ "$visible" = 0 ]; then echo "train.sh: no GPU is visible, training on the CPU" >&2; else has_gpu=1; fi
  [ "${gpus:-1}" -le $((visible > 0 ? visible : 1)) ] ||
    die "--gpus is $gpus, more than the $visible that are visible; those of other nodes count under srun only"
  gpus=${gpus:-$((visible > 0 ? visible : 1))}
}

# split_update TOKENS GPUS MOST: an update of TOKENS as GPUS times $update_freq times $max_tokens, with $max_tokens at most MOST and
# as few steps as that allows; what does not divide, less than GPUS times $update_freq, is left out
split_update() {
  [ "$2" -le "$1" ] || die "--gpus is $2, more than an update has tokens, $1"
  update_freq=$((($1 + $2 * $3 - 1) / ($2 * $3)))
  max_tokens=$(($1 / ($2 * update_freq)))
  [ "$max_tokens" -gt 0 ] || die "--max-tokens is $3, too few for an update of $1 tokens on $2 GPUs"
}

# cpu_precision: $precision, flags of fairseq-train for a training on the CPU: bfloat16 where the processor multiplies in it, unless
# $float32; nothing where there is a GPU. And memory of a step is kept for the next one instead of given back to the system.
cpu_precision() {
  precision=()
  on_cpu || ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || return 0
  export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592
  [ -z "$float32" ] && grep -qsE '\b(avx512_bf16|amx_bf16)\b' /proc/cpuinfo || return 0
  precision=(--bf16)
  echo "train.sh: on the CPU, in bfloat16, which it multiplies faster; --float32 turns it off" >&2
}

check_bf16() { # before fairseq finds out on the way
  ! on_cpu || return 0
  python -c 'import sys, torch
sys.exit(torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability()[0] < 8)' ||
    die "--bf16 is not for this GPU, which has no bfloat16; use fairseq-train's --fp16"
}

# costs PARAMETERS MULTIPLICATIONS: says what the training needs; both in millions, MULTIPLICATIONS a token
costs() {
  [ -z "$smoke" ] && [ "${SLURM_PROCID:-0}" = 0 ] || return 0
  local parent=$save device=GPU
  [ -n "$has_gpu" ] || device=CPU
  until [ -d "$parent" ]; do parent=$(dirname "$parent"); done
  # Of checkpoints there are checkpoint_last.pt and checkpoint_best.pt, too. What is there from an earlier start is replaced in time.
  awk -v parameters="$1" -v multiplications="$2" -v updates="$updates" -v kept=$((kept + 2)) -v layer="$layer" \
    -v device="$device" -v gpus="$gpus" -v max_tokens="$max_tokens" -v update_freq="$update_freq" -v save="$save" \
    -v bytes="$([ -n "$bf16" ] && echo 20 || echo 16)" \
    -v free="$(df -Pk "$parent" | awk 'NR == 2 { print $4 }')" \
    -v there="$(find "$save" -name '*.pt' -exec du -k {} + 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }')" 'BEGIN {
      # float32 weights and the two moments of Adam; forward and backward are 3 times a multiplication and an addition each
      checkpoint = 12 * parameters / 1000; disk = kept * checkpoint; free *= 1024 / 1e9; there *= 1024 / 1e9
      tokens = gpus * max_tokens * update_freq
      operations = 6 * multiplications * 1e6 * tokens * updates
      say = "train.sh: "
      printf say "%s, about %d million parameters; %d updates of %d tokens, on %d %s %d at once, %d %s an update\n",
        layer, parameters, updates, tokens, gpus, gpus == 1 ? device : device "s", max_tokens,
        update_freq, update_freq == 1 ? "time" : "times"
      printf say "time: about %.2g floating-point operations, which is %.0f hours at 100 TFLOP/s in all (computed, not measured)\n",
        operations, operations / 1e14 / 3600
      printf say "memory of each %s: about %.0f GB for parameters, gradients and Adam, and on top what %d tokens need (--max-tokens)\n",
        device, bytes * parameters / 1000, max_tokens
      printf say "disk: about %.0f GB for %d checkpoints in %s; %.0f GB are free%s\n",
        disk, kept, save, free, free + there < disk ? ", WHICH IS TOO LITTLE" : ""
    }' >&2
}

# two_stages LR FINETUNE_LR: $stage, fairseq-train's flags for the first stage or, with --finetune, the second, and its $save
two_stages() {
  stage=(--lr "$1")
  [ -n "$finetune" ] || return 0
  [ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt; run train.sh $layer without --finetune first"
  stage=(--lr "$2" --finetune-from-model "$save/checkpoint_best.pt" --averaging-epoch 0 --stop-when-nonmonotone)
  save=$save/finetuned
}

# ------------------------------------------------------------------------------------ the two WMT examples' train.sh

# wmt_options EXAMPLE DATA WIDTH UPDATES ARGUMENT...: as train_options, and $gpus, $update_freq, $max_tokens, $updates, how many of
# them lie between checkpoints ($interval), of which the last are kept ($kept), and flags of fairseq-train in $flags
wmt_options() {
  local example=$1 width=$(($3 / 32)) tokens=$((8 * 4096)) # 8 replicas, each with a batch of 4096
  usage="usage: train.sh softmax|mos|moc|mixtape [--gpus N] [--max-tokens N] [--bf16] [--smoke] [--data DIR] [--save DIR] [--seed N] [flags of fairseq-train, which win over those here]
  --gpus N         GPUs, on all nodes together (default: those that are visible; under srun, times the number of nodes)
  --max-tokens N   at most as many tokens on a GPU at once (default: 4096); an update has the paper's 32,768 all the same
  --bf16           bfloat16, where the GPU has it
  --smoke          a model a thousand times smaller for a few updates on the CPU, to try the recipe
  --data DIR       what prepare.sh wrote (default: $2)
  --save DIR       checkpoints and train.log (default: checkpoints/$example.LAYER.seedN)
  --seed N         default: 1"
  updates=$4 interval=2000 kept=10 flags=()
  train_options "$2" "softmax mos moc mixtape" "${@:5}"
  seed=${seed:-1}
  save=${save:-checkpoints/$example.$layer.seed$seed}
  compgen -G "$data/dict.*.txt" >/dev/null || die "--data $data holds no binarized data; run prepare.sh first"
  max_tokens=${max_tokens:-4096}
  positive --max-tokens "$max_tokens"
  if [ -n "$smoke" ]; then
    # The architecture's shape, some thousand times smaller, and a checkpoint an update.
    tokens=1024 max_tokens=256 updates=10 interval=1 kept=3
    flags=(--cpu --num-workers 0 --encoder-embed-dim $width --encoder-ffn-embed-dim $((4 * width)) --encoder-layers 2)
    flags+=(--decoder-layers 2 --encoder-attention-heads 4 --decoder-attention-heads 4)
    flags+=(--gate-dim 8 --max-relative-position 4 --log-interval 1)
  fi
  count_gpus
  [ -z "$bf16" ] || { check_bf16; flags+=(--bf16); }
  split_update "$tokens" "$gpus" "$max_tokens"
}

# ------------------------------------------------------------------------------------ evaluate.sh of a translation

find_references() { # find_references TARGET: $references, a file or a test set of sacrebleu, as flags of score.py
  local found
  [ -z "$references" ] || [ -z "$test_set" ] || die "--references and --test-set exclude each other"
  if [ -n "$test_set" ]; then
    sacrebleu --test-set "$test_set" --language-pair "en-$1" --echo ref >/dev/null 2>&1 ||
      die "--test-set $test_set en-$1 is not to be had from sacrebleu; give the references as --references FILE"
    references=(--test-set "$test_set")
    return
  fi
  found=${references:-$data/text/raw.test.$1}
  [ -f "$found" ] || die "${references:+--references }$found is no file; run prepare.sh first, or give the references as --references FILE"
  references=(--references "$found")
}

test_perplexity() { # test_perplexity FLAG...: fairseq-validate of $save/average.pt, into $save/test-perplexity.txt
  # nll_loss (bits a subword, </s> included) and ppl = 2^nll_loss are those of the model, without label smoothing.
  fairseq-validate "$data" --user-dir "$root/mixtape_plugin" --path "$save/average.pt" --task translation --valid-subset test \
    --log-format simple "$@" >"$save/validate.log" 2>&1 || die "fairseq-validate failed: $(tail -n 1 "$save/validate.log")"
  grep -o 'nll_loss [^ ]* | ppl [^ ]*' "$save/validate.log" | tail -n 1 | sed 's/^/test /' >"$save/test-perplexity.txt.part" ||
    die "fairseq-validate gave no perplexity; see $save/validate.log"
  mv "$save/test-perplexity.txt.part" "$save/test-perplexity.txt"
  cat "$save/test-perplexity.txt"
}

search=(--beam 4 --lenpen 0.6) # flags of fairseq-generate; an example may have others
translate() { # translate TARGET FLAG...: fairseq-generate with $save/average.pt, detokenized into $save/test.hyp
  local target=$1 bpe=subword_nmt
  shift
  [ ! -f "$data/text/spm.model" ] || bpe=sentencepiece
  fairseq-generate "$data" --user-dir "$root/mixtape_plugin" --path "$save/average.pt" --gen-subset test "${search[@]}" \
    --post-process "$bpe" --log-format simple "$@" >"$save/generate.log" 2>&1 ||
    die "fairseq-generate failed: $(tail -n 1 "$save/generate.log")"
  # fairseq translates sentences of similar length together; H-<line number> restores the order of the test set.
  grep '^H-' "$save/generate.log" | sed 's/^H-//' | sort -n | cut -f 3- | sacremoses -q -l "$target" detokenize >"$save/test.hyp.part" ||
    die "$save/generate.log holds no translations that could be detokenized"
  mv "$save/test.hyp.part" "$save/test.hyp"
}

scores() { # scores TARGET: all BLEU and chrF of $save/test.hyp, into $save/score.txt and score.json
  local tokens=$data/text/lower-cased-tokens.test.$1
  [ ! -f "$tokens" ] || references+=(--lower-cased-tokens "$tokens")
  python "$root/scripts/score.py" --hypotheses "$save/test.hyp" "${references[@]}" --source-lang en --target-lang "$1" \
    --json "$save/score.json" >"$save/score.txt.part"
  mv "$save/score.txt.part" "$save/score.txt"
  cat "$save/score.txt"
}

# evaluate_translation TARGET LAST epochs|updates: the whole of evaluate.sh after its options; LAST is the default of --last
evaluate_translation() {
  local flags=(--max-tokens "${max_tokens:-4096}" ${cpu:+--cpu})
  no_more "${extra[@]+"${extra[@]}"}"
  positive --max-tokens "${max_tokens:-4096}"
  find_references "$1"

  python "$root/scripts/average_checkpoints.py" --last "${last:-$2}" "$save" --by "$3" --output "$save/average.pt"
  test_perplexity "${flags[@]}"
  translate "$1" "${flags[@]}"
  scores "$1"
}

evaluate_wmt() { # evaluate_wmt DATA TARGET ARGUMENT...: the whole of evaluate.sh; DATA is the default of --data
  usage="usage: evaluate.sh DIR [--data DIR] [--last N] [--references FILE] [--test-set NAME] [--max-tokens N] [--cpu]
  DIR                the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR         what prepare.sh wrote (default: $1)
  --last N           how many checkpoints to average (default: 10)
  --references FILE  detokenized references (default: text/raw.test.$2 of the data)
  --test-set NAME    instead, the references of sacrebleu's test set, wmt14/full, which it downloads
  --max-tokens N     tokens of a batch (default: 4096)
  --cpu              use the CPU where there is a GPU, too"
  evaluate_options "$1" "${@:3}"
  evaluate_translation "$2" 10 updates
}

# --------------------------------------------------------------------------------- evaluate.sh of a language model

check_trained() { # whether there are $save/checkpoint_best.pt and binarized data in $1
  [ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
  [ -f "$1/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
}

perplexity() { # perplexity SPLIT COLUMNS UNIT FLAGS...: fairseq-eval-lm of $save/checkpoint_best.pt, into $save/SPLIT.txt
  local split=$1 columns=$2 unit=$3 log=$save/eval.$1.log count bits
  shift 3
  fairseq-eval-lm "$data" --user-dir "$root/mixtape_plugin" --task bptt_language_modeling --path "$save/checkpoint_best.pt" \
    --gen-subset "$split" --batch-size "$columns" --log-format simple --log-interval 1000 "$@" >"$log" 2>&1 ||
    die "fairseq-eval-lm failed: $(tail -n 1 "$log")"
  count=$(sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' "$log")
  bits=$(sed -n 's/.*Loss (base 2): \([^ ,]*\), Perplexity: \([^ ]*\).*/\1 bits a '"$unit"', perplexity \2/p' "$log")
  [ -n "$bits" ] || die "fairseq-eval-lm gave no perplexity; see $log"
  echo "$split: $count ${unit}s, $bits" >"$save/$split.txt.part"
  mv "$save/$split.txt.part" "$save/$split.txt"
  cat "$save/$split.txt"
}

adapt() { # adapt DATASET: the test text by --dynamic and --cache with the papers' settings for DATASET; nothing without any
  local script
  [ -n "$dynamic$cache" ] || return 0
  for script in ${dynamic:+dynamic_evaluation} ${cache:+cache_pointer}; do
    python "$root/scripts/$script.py" "$data" --path "$save/checkpoint_best.pt" --dataset "$1" --subset test \
      "${extra[@]+"${extra[@]}"}" | tee "$save/$script.txt.part"
    mv "$save/$script.txt.part" "$save/$script.txt"
  done
  exit
}
