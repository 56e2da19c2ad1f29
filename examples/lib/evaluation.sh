# What evaluate.sh of all examples share; they source it, with $root set and, where they have options of their own, $usage.

source "$root/examples/lib/recipes.sh"
analyses=({rank,predictions,similarity}.json) # what scripts/analyze.py leaves in a training's folder

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
      [ $# -gt 1 ] && [[ $2 != --* ]] || die "$1 needs a value; see ${0##*/} --help"
      [ -n "$2" ] || die "$1 is empty; see ${0##*/} --help"
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

evaluate_options() { # evaluate_options DATA ARGUMENT...: $save, and $data … $extra as in take_options; DATA is the default of $data
  data=$1 dynamic="" cache="" cpu="" last="" valid="" tune_lenpen="" test_set="" references="" max_tokens=""
  shift
  case ${1-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
  save=$1
  shift
  take_options "$@"
  [ -d "$save" ] || die "$save is no folder"
  [ -w "$save" ] || die "$save cannot be written to, and scores belong there"
}

no_more() { # no_more ARGUMENT...: refuses what no option took
  [ $# = 0 ] || die "unknown option $1; see ${0##*/} --help"
}

# ---------------------------------------------------------------------------------------------------- translation

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
  same_number "$found"
  references=(--references "$found")
}

records() { awk 'END { print NR }' "$1"; } # lines, of which the last one need not end

same_number() { # same_number FILE: has as many lines as the test text, where that is there: else all work would be for nothing
  local text=$data/text/raw.test.en
  [ ! -f "$text" ] || [ "$(records "$1")" = "$(records "$text")" ] ||
    die "$1 has $(records "$1") lines, and the test text, $text, has $(records "$text")"
}

# validation CHECKPOINT SPLIT LOG FLAG...: fairseq-validate, its loss and perplexity into $save/SPLIT-perplexity.txt.part
validation() {
  local checkpoint=$save/$1 split=$2 log=$save/$3
  shift 3
  fairseq-validate "$data" --user-dir "$root/mixtape_plugin" --path "$checkpoint" --task translation --valid-subset "$split" \
    --log-format simple "$@" >"$log" 2>&1 || die "fairseq-validate failed: $(tail -n 1 "$log")"
  # nll_loss (bits a subword, </s> included) and ppl = 2^nll_loss are those of the model, without label smoothing.
  grep -o 'nll_loss [^ ]* | ppl [^ ]*' "$log" | tail -n 1 | sed "s/^/$split /" >"$save/$split-perplexity.txt.part" ||
    die "fairseq-validate gave no perplexity; see $log"
}

show() { # show NAME: $save/NAME.part is $save/NAME from now on, and printed
  mv "$save/$1.part" "$save/$1"
  cat "$save/$1"
}

search=(--beam 4 --lenpen 0.6) # flags of fairseq-generate; an example may have others
# translate TARGET test|valid NAME LOG FLAG...: fairseq-generate with $save/average.pt, detokenized into $save/NAME.hyp
translate() {
  local target=$1 subset=$2 name=$3 log=$save/$4 bpe=subword_nmt
  shift 4
  [ ! -f "$data/text/spm.model" ] || bpe=sentencepiece
  fairseq-generate "$data" --user-dir "$root/mixtape_plugin" --path "$save/average.pt" --gen-subset "$subset" "${search[@]}" \
    --post-process "$bpe" --log-format simple "$@" >"$log" 2>&1 || die "fairseq-generate failed: $(tail -n 1 "$log")"
  # fairseq translates sentences of similar length together; H-<line number> restores the order of the text.
  grep '^H-' "$log" | sed 's/^H-//' | sort -n | cut -f 3- | sacremoses -q -l "$target" detokenize >"$save/$name.hyp.part" ||
    die "$log holds no translations that could be detokenized"
  mv "$save/$name.hyp.part" "$save/$name.hyp"
}

scores() { # scores TARGET NAME PREFIX FLAG...: all BLEU and chrF of $save/NAME.hyp, into PREFIXscore.txt and PREFIXscore.json
  local result=$save/${3}score
  python "$root/scripts/score.py" --hypotheses "$save/$2.hyp" "${@:4}" --source-lang en --target-lang "$1" \
    --json "$result.json" >"$result.txt.part"
  show "${3}score.txt"
}

bleu_13a() { # bleu_13a SCORES: out of a file that scores wrote
  sed -n 's/^BLEU 13a  *\([0-9.]*\) .*/\1/p' "$1"
}

# tune_lenpen TARGET FLAG...: of the length penalties $tune_lenpen the one with the best BLEU of the validation text, and the
# test text with it, into $save/lenpen; the outcome into $save/lenpen.json
tune_lenpen() {
  local target=$1 lenpen chosen bleu best=-1
  shift
  mkdir -p "$save/lenpen"
  for lenpen in $tune_lenpen; do
    translate "$target" valid "lenpen/valid.$lenpen" "lenpen/valid.$lenpen.log" --lenpen "$lenpen" "$@"
    scores "$target" "lenpen/valid.$lenpen" "lenpen/valid.$lenpen." --references "$data/text/raw.valid.$target" >/dev/null
    bleu=$(bleu_13a "$save/lenpen/valid.$lenpen.score.txt")
    echo "validation text, --lenpen $lenpen: BLEU 13a $bleu"
    if awk "BEGIN { exit !($bleu > $best) }"; then chosen=$lenpen best=$bleu; fi
  done
  echo "test text, --lenpen $chosen:"
  translate "$target" test lenpen/test lenpen/test.log --lenpen "$chosen" "$@"
  scores "$target" lenpen/test lenpen/test. "${references[@]}"
  bleu=$(bleu_13a "$save/lenpen/test.score.txt")
  printf '{"columns": {"lenpen": %s, "valid BLEU 13a at lenpen": %s, "BLEU 13a at lenpen": %s}}\n' "$chosen" "$best" "$bleu" \
    >"$save/lenpen.json.part"
  mv "$save/lenpen.json.part" "$save/lenpen.json"
}

# evaluate_translation TARGET LAST epochs|updates: the whole of evaluate.sh after its options; LAST is the default of --last
evaluate_translation() {
  local flags=(--max-tokens "${max_tokens:-4096}" ${cpu:+--cpu})
  no_more "${extra[@]+"${extra[@]}"}"
  case $save in *:*) die "$save has a colon, at which fairseq-generate takes paths apart: rename it" ;; esac
  positive --max-tokens "${max_tokens:-4096}"
  find_references "$1"
  local number='(0|[1-9][0-9]*)(\.[0-9]+)?'
  [ -z "$tune_lenpen" ] || [[ $tune_lenpen =~ ^$number(\ $number)*$ ]] ||
    die "--tune-lenpen is '$tune_lenpen', allowed are numbers, 0 or more, such as '1 1.5 2'"
  [ -z "$valid$tune_lenpen" ] || [ -f "$data/text/raw.valid.$1" ] ||
    die "$data/text/raw.valid.$1, which --valid and --tune-lenpen score, is no file; run prepare.sh first"
  local trained
  trained=$(sed -n 's/.* | \[\([^]]*\)\] dictionary: [0-9]* types$/\1/p' "$save/train.log" 2>/dev/null | tail -n 1) || true
  [ "${trained:-$1}" = "$1" ] || die "--data $data is for $1, and $save/train.log says that it translates to $trained"
  local tokens=$data/text/lower-cased-tokens.test.$1
  [ ! -f "$tokens" ] || { same_number "$tokens"; references+=(--lower-cased-tokens "$tokens"); }

  local text="" before="" now made=(test.hyp score.{txt,json})
  local of_this=(test-perplexity.txt "${analyses[@]}" {test,valid}.hyp {,valid-}score.{txt,json} lenpen{,.json})
  [ -z "$valid" ] || made+=(valid.hyp valid-score.{txt,json})
  [ -z "$tune_lenpen" ] || made+=(lenpen{,.json})
  # average.md5 is of the average and the test text that the files here belong to: average.pt may be a later one, of a run that
  # was killed.
  [ ! -f "$data/text/raw.test.$1" ] || text=$(checksum md5 "$data/text/raw.test.$1")
  if [ -f "$save/average.md5" ]; then
    before=$(cat "$save/average.md5")
  elif [ -f "$save/average.pt" ]; then
    before=$(checksum md5 "$save/average.pt")
  fi
  case $before in "" | *" "*) ;; *) before+=" $text" ;; esac # it was written before there was a second word
  python "$root/scripts/average_checkpoints.py" --last "${last:-$2}" "$save" --by "$3" --output "$save/average.pt"
  now="$(checksum md5 "$save/average.pt") $text"
  [ -n "$before" ] && [ "$now" = "$before" ] || (cd "$save" && rm -rf "${of_this[@]}") # they are of another model or text
  echo "$now" >"$save/average.md5"
  validation average.pt test validate.log "${flags[@]}" # fails with another dictionary, before what is there is lost
  show test-perplexity.txt
  (cd "$save" && rm -rf "${made[@]}")
  translate "$1" test test generate.log "${flags[@]}"
  scores "$1" test "" "${references[@]}"
  if [ -n "$valid" ]; then
    echo "validation text:"
    translate "$1" valid valid valid-generate.log "${flags[@]}"
    scores "$1" valid valid- --references "$data/text/raw.valid.$1"
  fi
  [ -z "$tune_lenpen" ] || tune_lenpen "$1" "${flags[@]}"
}

evaluate_wmt() { # evaluate_wmt DATA TARGET ARGUMENT...: the whole of evaluate.sh; DATA is the default of --data
  usage="usage: evaluate.sh DIR [--data DIR] [--last N] [--valid] [--tune-lenpen LIST] [--references FILE] [--test-set NAME] [--max-tokens N] [--cpu]
  DIR                the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR         what prepare.sh wrote (default: $1)
  --last N           how many checkpoints to average (default: 10)
  --valid            also translate and score the validation text, into valid.hyp, valid-score.txt and valid-score.json
  --tune-lenpen LIST also translate the test text with the penalty of LIST, such as '0.4 0.6 1', best in
                     validation BLEU; into lenpen, lenpen.json
  --references FILE  detokenized references (default: text/raw.test.$2 of the data)
  --test-set NAME    instead, the references of sacrebleu's test set, wmt14/full, which it downloads
  --max-tokens N     tokens of a batch (default: 4096)
  --cpu              use the CPU where there is a GPU, too"
  evaluate_options "$1" "${@:3}"
  evaluate_translation "$2" 10 updates
}

# ------------------------------------------------------------------------------------------------- language models

# drop_older NAME...: removes each of these files of $save that is older than its best checkpoint: of the one before, perhaps
drop_older() {
  local name
  for name; do
    [ ! "$save/checkpoint_best.pt" -nt "$save/$name" ] || rm -f "$save/$name"
  done
}

perplexity() { # perplexity SPLIT COLUMNS UNIT FLAGS...: fairseq-eval-lm of $save/checkpoint_best.pt, into $save/SPLIT.txt
  local split=$1 columns=$2 unit=$3 log=$save/eval.$1.log count bits
  shift 3
  fairseq-eval-lm "$data" --user-dir "$root/mixtape_plugin" --task bptt_language_modeling --batch-size "$columns" \
    --log-format simple --log-interval 1000 "$@" --path "$save/checkpoint_best.pt" --gen-subset "$split" >"$log" 2>&1 ||
    die "fairseq-eval-lm failed: $(tail -n 1 "$log")"
  count=$(sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' "$log")
  bits=$(sed -n 's/.*Loss (base 2): \([^ ,]*\), Perplexity: \([^ ]*\).*/\1 bits a '"$unit"', perplexity \2/p' "$log")
  [ -n "$bits" ] || die "fairseq-eval-lm gave no perplexity; see $log"
  echo "$split: $count ${unit}s, $bits" >"$save/$split.txt.part"
  if [ "$split" = valid ]; then # what is of the checkpoint before, perhaps
    rm -f "$save/test.txt"
    drop_older {dynamic_evaluation,cache_pointer}.txt "${analyses[@]}"
  fi
  show "$split.txt"
}

adapt() { # adapt DATASET FLAG...: the test text by --dynamic and --cache with the papers' settings for DATASET
  local script dataset=$1
  shift
  for script in ${dynamic:+dynamic_evaluation} ${cache:+cache_pointer}; do
    python "$root/scripts/$script.py" "$data" --dataset "$dataset" "$@" --path "$save/checkpoint_best.pt" --subset test |
      tee "$save/$script.txt.part" || { rm -f "$save/$script.txt.part"; exit 1; }
    drop_older {valid,test,dynamic_evaluation,cache_pointer}.txt "${analyses[@]}"
    mv "$save/$script.txt.part" "$save/$script.txt"
  done
}

# evaluate_language_model DATASET UNIT FLAGS ARGUMENT...: the whole of evaluate.sh; FLAGS, of fairseq-eval-lm, are one string.
# Where $adaptive is set it has --dynamic and --cache.
evaluate_language_model() {
  local dataset=$1 unit=$2 flags
  read -ra flags <<<"$3"
  usage="usage: evaluate.sh DIR [--data DIR] ${adaptive:+[--dynamic] [--cache] }[flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/$dataset)${adaptive:+
  --dynamic     instead, the test text by dynamic evaluation, scripts/dynamic_evaluation.py, which further flags go to
  --cache       instead, the test text with a cache pointer, scripts/cache_pointer.py, which further flags go to}"
  evaluate_options "data-bin/$dataset" "${@:4}"
  [ ! -d "$data/shard00" ] || data=$data/shard00 # which has valid and test
  [ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
  [ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"
  case " ${extra[*]-}" in
    *" --gen"* | *" --sub"*) die "another text is not allowed: valid.txt is of valid, all other files are of test" ;;
    *" --path"*) die "another model is not allowed: the figures are of $save/checkpoint_best.pt" ;;
  esac
  if [ -n "$dynamic$cache" ]; then
    [ -z "$dynamic" ] || [ -z "$cache" ] || [ "${extra[*]:---cpu}" = --cpu ] ||
      die "--dynamic and --cache at once take no further flags but --cpu, as each has its own: give one after the other"
    adapt "$dataset" "${extra[@]+"${extra[@]}"}"
  else
    perplexity valid 10 "$unit" "${flags[@]}" "${extra[@]+"${extra[@]}"}"
    perplexity test 1 "$unit" "${flags[@]}" "${extra[@]+"${extra[@]}"}"
  fi
}
