#!/usr/bin/env bash
# From nothing to a table: the same tiny Transformer with one output layer after the other, on a corpus written here.
# Running it again reuses what is there.
set -euo pipefail

known="softmax mos moc mixtape sigsoftmax gss plif" # output layers
usage="usage: quickstart.sh [--data DIR [--source-lang XX]] [--out DIR] [--layers LIST] [--updates N] [--no-setup]
  --data DIR    your own parallel text instead of a generated corpus: {train,valid,test}.XX and .YY, line by line
  --source-lang XX
                the language to translate from (default: the first by alphabet)
  --out DIR     everything that is written (default: quickstart-output, with --data quickstart-output.NAME after its
                folder; .2 and so on is added where that holds a run with other options)
  --layers LIST output layers to compare, of ${known// /,} (default: softmax,mixtape);
                those that were trained before are not trained again
  --updates N   training length (default: 1000)
  --no-setup    use the Python environment that is active instead of setting one up"
die() { echo "quickstart.sh: $*" >&2; exit 1; }
unset CDPATH # with it cd may go elsewhere, and print where

data="" from="" out="" layers=softmax,mixtape updates=1000 setup=yes
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) echo "$usage"; exit ;;
    --no-setup) setup=no; shift; continue ;;
    --data | --source-lang | --out | --layers | --updates) [ $# -gt 1 ] && [[ $2 != --* ]] || die "$1 needs a value; see quickstart.sh --help" ;;
    *) die "unknown option $1; see quickstart.sh --help" ;;
  esac
  case $1 in --data) data=$2 ;; --source-lang) from=$2 ;; --out) out=$2 ;; --layers) layers=$2 ;; --updates) updates=$2 ;; esac
  shift 2
done
[[ $updates =~ ^[1-9][0-9]*$ ]] || die "--updates is '$updates', allowed is a positive whole number"
# Embeddings of E = 8 for all, on a Transformer of width 64: layers without a projection of their own get there by a linear map.
flags_of() { # flags_of LAYER
  case $1 in
    softmax | sigsoftmax | gss | plif) echo --decoder-output-dim 8 ;;
    mos | moc) echo --output-embed-dim 8 --num-components 4 ;;
    mixtape) echo --output-embed-dim 8 --num-components 4 --gate-dim 16 --frequent-ratio 1 --gate-noise 0 ;;
    *) return 1 ;;
  esac
}
IFS=, read -ra layers <<<"$layers"
[ ${#layers[@]} -gt 0 ] || die "--layers is empty; see quickstart.sh --help"
[ -z "$(printf '%s\n' "${layers[@]}" | sort | uniq -d)" ] || die "--layers names one twice: ${layers[*]}"
for layer in "${layers[@]}"; do
  flags_of "$layer" >/dev/null || die "--layers names '$layer', allowed are ${known// /, }"
done
[ -z "$data" ] || [ -d "$data" ] || die "--data $data is no folder"
[ -z "$data" ] || data=$(cd "$data" && pwd)
[ -z "$from" ] || [ -n "$data" ] || die "--source-lang $from goes with --data only"
settings="data ${data:-generated}${from:+ from $from}, updates $updates"
if [ -n "$data" ]; then # of a text that was changed nothing is reused
  settings+=", checksum $({ cat "$data"/{train,valid,test}.* 2>/dev/null || true; } | cksum)"
fi
holds_other_run() { [ -f "$1/settings" ] && [ "$(cat "$1/settings")" != "$settings" ]; }
if [ -z "$out" ]; then # of this name, the first that is new or holds this very run
  name=quickstart-output${data:+.$(basename "$data")}
  out=$name
  for ((number = 2; ; number++)); do
    holds_other_run "$out" || break
    out=$name.$number
  done
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
case $out in *[,:]*) die "--out $out has a comma or a colon, at which fairseq takes a name apart: choose another one" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/lib/jobs.sh

if [ $setup = yes ]; then
  scripts/setup.sh
  PATH=$(cd "${MIXTAPE_VENV:-.venv}" && pwd)/bin:$PATH
fi
export OMP_NUM_THREADS=1 PYTHONUTF8=1 PYTHONUNBUFFERED=1 # tensors are tiny: both trainings run at once instead
! holds_other_run "$out" ||
  die "--out $out holds a run with other settings ($(cat "$out/settings")): choose another --out or remove it"
SECONDS=0
say() { echo "[$SECONDS s] $*"; }

text=$out/text
if [ ! -d "$text" ]; then
  rm -rf "$text.part"
  if [ -z "$data" ]; then
    say "writing a parallel corpus"
    python scripts/make_corpus.py --out "$text.part"
  else
    mkdir "$text.part"
    langs=()
    for file in "$data"/train.*; do [ ! -f "$file" ] || langs+=("${file##*.}"); done
    [ ${#langs[@]} = 2 ] || die "--data $data must hold train.XX and train.YY for two languages, and has ${#langs[@]} files train.*"
    [ -z "$from" ] || [ -f "$data/train.$from" ] || die "--source-lang $from: --data $data has no train.$from, but ${langs[*]}"
    for split in train valid test; do
      for lang in "${langs[@]}"; do
        [ -s "$data/$split.$lang" ] || die "--data $data: $split.$lang is missing or empty"
        # without carriage returns, which some of the tools take for the end of a line
        iconv -f UTF-8 -t UTF-8 "$data/$split.$lang" 2>/dev/null | tr -d '\r' >"$text.part/raw.$split.$lang" ||
          die "--data $data: $split.$lang is not UTF-8 text"
      done
      # grep counts a last line without its newline, too, as fairseq does
      counts=$(for lang in "${langs[@]}"; do grep -c '' "$text.part/raw.$split.$lang"; done | sort -u | wc -l)
      [ "$counts" -eq 1 ] || die "--data $data: $split.${langs[0]} and $split.${langs[1]} differ in their number of lines"
    done
    say "learning a joint BPE of 4,000 merges"
    cat "$text.part"/raw.train.* >"$text.part/both"
    subword-nmt learn-bpe --symbols 4000 --input "$text.part/both" --output "$text.part/codes" 2>"$out/bpe.log" ||
      die "subword-nmt failed: $(tail -n 1 "$out/bpe.log")"
    for split in train valid test; do
      for lang in "${langs[@]}"; do
        subword-nmt apply-bpe --codes "$text.part/codes" --input "$text.part/raw.$split.$lang" --output "$text.part/$split.$lang"
      done
    done
  fi
  echo "$settings" >"$out/settings"
  mv "$text.part" "$text"
fi
read -r source target < <(for file in "$text"/train.*; do echo "${file##*.}"; done | xargs)
[ "$from" != "$target" ] || { target=$source source=$from; }

binarized=$out/data-bin
if [ ! -d "$binarized" ]; then
  say "fairseq-preprocess"
  rm -rf "$binarized.part"
  fairseq-preprocess --source-lang "$source" --target-lang "$target" --destdir "$binarized.part" --padding-factor 1 --workers 2 \
    --trainpref "$text/train" --validpref "$text/valid" --testpref "$text/test" >"$out/preprocess.log" 2>&1 ||
    die "fairseq-preprocess failed: $(tail -n 1 "$out/preprocess.log")"
  mv "$binarized.part" "$binarized"
fi

train() { # train LAYER
  local layer=$1 flags
  [ ! -f "$out/$layer/trained" ] || return 0
  mkdir -p "$out/$layer"
  read -ra flags <<<"$(flags_of "$layer")"
  fairseq-train "$binarized" --source-lang "$source" --target-lang "$target" --user-dir mixtape_plugin --save-dir "$out/$layer" --arch mixtape_transformer_tiny \
    --encoder-layers 1 --decoder-layers 1 --output-layer "$layer" "${flags[@]}" --dropout 0 --criterion output_layer_cross_entropy \
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr 5e-3 --clip-norm 1 --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update "$updates" \
    --max-update "$updates" --max-tokens 1024 --seed 1 --distributed-world-size 1 --num-workers 0 --no-epoch-checkpoints --log-format simple --log-interval 50 \
    2>&1 | tee -ia "$out/$layer/train.log" |
    sed -nu "s/.*train_inner.* ppl=\([0-9.]*\), wps=\([0-9.]*\),.*num_updates=\([0-9]*\),.*/$layer\tupdate \3 of $updates\tperplexity \1\t\2 tokens\/s/p" &
  last_job || die "training $layer failed: $(grep -v '^ ' "$out/$layer/train.log" | tail -n 1)"
  touch "$out/$layer/trained"
}
say "training ${layers[*]}, $updates updates each"
for ((i = 0; i < ${#layers[@]}; i += 2)); do # two at once
  jobs=()
  for layer in "${layers[@]:i:2}"; do
    train "$layer" &
    jobs+=($!)
  done
  trap 'kill "${jobs[@]}" 2>/dev/null || true; wait; exit 143' TERM HUP
  trap 'kill "${jobs[@]}" 2>/dev/null || true; wait; exit 130' INT
  failed=no
  for job in "${jobs[@]}"; do wait "$job" || failed=yes; done
  [ $failed = no ] || exit 1
done

# In the generated corpus the right translation is each word's likeliest one; test.TARGET is a draw.
reference=$text/test.$target
[ ! -f "$text/raw.test.$target" ] || reference=$text/raw.test.$target
[ ! -f "$text/test.likeliest.$target" ] || reference=$text/test.likeliest.$target
for layer in "${layers[@]}"; do
  [ ! -f "$out/$layer/score.json" ] || continue
  say "translating the test set with $layer"
  fairseq-generate "$binarized" --source-lang "$source" --target-lang "$target" --user-dir mixtape_plugin --path "$out/$layer/checkpoint_last.pt" --beam 4 --remove-bpe \
    --max-tokens 4096 --num-workers 0 >"$out/$layer/generate.log" 2>&1 || die "fairseq-generate failed: $(tail -n 1 "$out/$layer/generate.log")"
  grep '^H-' "$out/$layer/generate.log" | sed 's/^H-//' | sort -n | cut -f 3- >"$out/$layer/test.hyp"
  python scripts/score.py --hypotheses "$out/$layer/test.hyp" --references "$reference" --source-lang "$source" \
    --target-lang "$target" --json "$out/$layer/score.json" >"$out/$layer/score.txt"
done
say "measuring perplexity and rank"
python scripts/quickstart_report.py "$out" "${layers[@]}"
say "done: everything is in $out"
