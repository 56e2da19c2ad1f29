# What train.sh of all examples share; they source it, with $root set.

source "$root/examples/lib/recipes.sh"
source "$root/examples/lib/jobs.sh"

command=$(printf ' %q' "${0#"$root/"}" "$@") command=${command# } # as it was typed

# Flags of fairseq-train that several recipes share.
language_model=(--task bptt_language_modeling --criterion awd_lstm_cross_entropy --batch-size-valid 10 --no-epoch-checkpoints)
language_model+=(--log-format simple --log-interval 200)
# Merity et al. 2018
awd_lstm=("${language_model[@]}" --tokens-per-sample 70 --ar-alpha 2 --tar-beta 1)
awd_lstm+=(--optimizer nt_asgd --weight-decay 1.2e-6 --clip-norm 0.25)
# Segments of one length, and no penalties
lstm=("${language_model[@]}" --segment-length-std 0 --short-segment-probability 0 --ar-alpha 0 --tar-beta 0)

# plan FLAG... -- ARGUMENT...: plan_training.py sets $layer and its flags in $layer_flags, $data $save $seed and the other options
# out of train.sh's arguments, and $precision and $extra, flags that come last
plan() {
  local variables
  command -v python >/dev/null || die "python is not installed; scripts/setup.sh sets up all that is needed"
  variables=$(python "$root/examples/lib/plan_training.py" "$@") || exit
  eval "$variables"
}

# fairseq_train FLAG...: the recipe's command. FLAG... come after the data, the folders and the seed, and before the user's flags.
# On the terminal and in $save/train.log, after a line with this repository's commit, the hardware and train.sh's command;
# --print only prints it
fairseq_train() {
  local log=$save/train.log
  # fairseq would take all GPUs there are, each with an update's tokens of its own, and another training would come of it.
  [[ " $* " = *" --distributed-world-size "* ]] || set -- --distributed-world-size 1 "$@"
  set -- fairseq-train "$data" --user-dir "$root/mixtape_plugin" --save-dir "$save" --seed "$seed" \
    "$@" "${precision[@]+"${precision[@]}"}" "${extra[@]+"${extra[@]}"}"
  if [ -n "$print" ]; then
    python "$root/examples/lib/print_command.py" "$@"
    return
  fi
  command -v "$1" >/dev/null || die "$1 is not installed; scripts/setup.sh sets up all that is needed"
  mkdir -p "$save"
  [ -w "$save" ] || die "--save $save cannot be written to"
  [ "${SLURM_PROCID:-0}" = 0 ] || log=/dev/null # of several tasks of srun the first keeps the log
  { echo "train.sh: commit $(commit), on $(hardware), command $command"; exec "$@"; } 2>&1 | tee -ia "$log" &
  last_job
}

hardware() { # the processor, how many threads fairseq-train may have, and a GPU
  local processor gpu
  processor=$(sed -n '/^model name[[:space:]]*: /{s///p;q;}' "${MIXTAPE_CPUINFO:-/proc/cpuinfo}" 2>/dev/null) || true
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | xargs) || true
  echo "${processor:-$(uname -m)} (threads: ${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)})${gpu:+ with $gpu}"
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
