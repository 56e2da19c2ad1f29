#!/usr/bin/env bash
# Perplexity of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [--dynamic] [--cache] [flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/wikitext2)
  --dynamic     instead, the test text by dynamic evaluation, scripts/dynamic_evaluation.py, which further flags go to
  --cache       instead, the test text with a cache pointer, scripts/cache_pointer.py, which further flags go to"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/language_modeling.sh"

case ${1-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
save=$1 data=data-bin/wikitext2 modes="" extra=()
shift
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) echo "$usage"; exit ;;
    --data) [ $# -gt 1 ] || die "--data needs a value; see evaluate.sh --help"; data=$2; shift 2 ;;
    --dynamic) modes+=" dynamic_evaluation"; shift ;;
    --cache) modes+=" cache_pointer"; shift ;;
    *) extra+=("$1"); shift ;;
  esac
done
set -- "${extra[@]+"${extra[@]}"}"
[ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
[ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"

if [ -n "$modes" ]; then
  for script in $modes; do
    python "$root/scripts/$script.py" "$data" --path "$save/checkpoint_best.pt" --dataset wikitext2 --subset test "$@" |
      tee "$save/$script.txt.part"
    mv "$save/$script.txt.part" "$save/$script.txt"
  done
  exit
fi
perplexity valid 10 token --tokens-per-sample 70 "$@"
perplexity test 1 token --tokens-per-sample 70 "$@"
