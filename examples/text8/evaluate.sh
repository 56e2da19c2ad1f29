#!/usr/bin/env bash
# Bits per character of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/text8)"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/language_modeling.sh"

case ${1-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
save=$1 data=data-bin/text8 extra=()
shift
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) echo "$usage"; exit ;;
    --data) [ $# -gt 1 ] || die "--data needs a value; see evaluate.sh --help"; data=$2; shift 2 ;;
    *) extra+=("$1"); shift ;;
  esac
done
set -- "${extra[@]+"${extra[@]}"}"
[ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
[ -f "$data/dict.txt" ] || die "--data $data holds no binarized data; run prepare.sh first"

# The hidden state is carried along, so that the length of a segment changes the speed and no result.
perplexity valid 10 character --remove-eos --tokens-per-sample 1000 "$@"
perplexity test 1 character --remove-eos --tokens-per-sample 1000 "$@"
