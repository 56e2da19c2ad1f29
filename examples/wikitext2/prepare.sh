#!/usr/bin/env bash
# WikiText-2 (Merity et al. 2017) for fairseq: one token stream a split, one dictionary for all.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--out DIR] [--dict FILE] [--workers N]
  --from DIR     take wiki.{train,valid,test}.tokens or .txt, plain or .gz, from DIR instead of downloading
  --out DIR      binarized data, the text in DIR/text (default: data-bin/wikitext2)
  --dict FILE    the dict.txt of data that a model was trained on, to evaluate it: DIR may then lack train; unknown words
                 become <unk>
  --workers N    processes of fairseq-preprocess (default: 2)"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/language_modeling.sh"

from="" out=data-bin/wikitext2 dict="" workers=2
options "from out dict workers" "$@"
positive --workers "$workers"
from_folder
[ -z "$dict" ] || [ -f "$dict" ] || die "--dict $dict is no file"
url=${WIKITEXT2_URL:-https://wikitext.smerity.com/wikitext-2-v1.zip}
begin "$out" "from ${from:-$url}, dictionary ${dict:-of the text}"

texts=() prefixes=()
for split in train valid test; do
  if [ -n "$from" ]; then
    if ! take "$split" "wiki.$split.tokens" "wiki.$split.txt"; then
      [ "$split" = train ] && [ -n "$dict" ] && continue
      missing="--from $from has no wiki.$split.tokens or wiki.$split.txt, plain or .gz"
      [ "$split" != train ] || missing+="; to evaluate without it, give the --dict of the model's data"
      die "$missing"
    fi
  elif [ ! -f "$text/$split" ]; then
    fetch "$text/wikitext-2-v1.zip" "$url" zip_test
    make "$text/$split" zip_member "$text/wikitext-2-v1.zip" "wiki.$split.tokens" || die "$text/wikitext-2-v1.zip holds no wiki.$split.tokens"
  fi
  texts+=("$text/$split") prefixes+=("--${split}pref" "$text/$split")
done

dictionary "${texts[@]}"
binarize_text "$out" "${prefixes[@]}"
summary "$out" 33278 2088628 217646 245569
