#!/usr/bin/env bash
# Switchboard (telephone conversations, as Zhao et al. 2017 cleaned them) for fairseq: contexts, and the responses to them.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--train FILE] [--out DIR] [--types N] [--workers N]
  --from DIR     take {train,valid,test}.jsonl and, if it is there, test_multi_ref.json, plain or .gz, from DIR instead of
                 downloading them
  --train FILE   another training text in the same format, plain or .gz
  --out DIR      binarized data, the text in DIR/text (default: data-bin/switchboard)
  --types N      entries of the dictionary, with fairseq's four and the three marks (default: 10000)
  --workers N    processes of fairseq-preprocess (default: 2)"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/recipes.sh"

from="" train="" out=data-bin/switchboard types=10000 workers=2
options "from train out types workers" "$@"
positive --types "$types"
positive --workers "$workers"
from_folder
[ -z "$train" ] || [ -f "$train" ] || die "--train $train is no file"
url=${SWITCHBOARD_URL:-https://raw.githubusercontent.com/snakeztc/NeuralDialog-CVAE/master/data}
begin "$out" "from ${from:-$url}, train ${train:-of it}, types $types"

dialog() { python "$root/examples/lib/prepare_dialog.py" "$@"; }
is_blob() { dialog check "$2" --blob "$1"; } # is_blob ID FILE
declare -A blob=( # ids that git gives the files
  [train.jsonl]=d78d6e973fdab4ce825730c0f25fcc0bd2e7a918
  [valid.jsonl]=9c321920c918938b5feb57131b646156853cd7e4
  [test.jsonl]=67407f35fd1a4ae084509ab6daa5e708fc077629
  [test_multi_ref.json]=5e017c1ba5a28c6d63e84ebff7937d1dd685f750
)
original() { is_blob "${blob[$1]}" "$text/$1" 2>/dev/null || echo "prepare.sh: not the original: $text/$1" >&2; }

pairs() { # pairs SPLIT context|response; a damaged text is not kept, so that a rerun reads the mended one
  make "$text/$1.$2" dialog "$2" "$text/$1.jsonl" || { rm -f "$text/$1.jsonl"; exit 1; }
}
for split in train valid test; do
  file=$split.jsonl
  if [ $split = train ] && [ -n "$train" ]; then
    copy "$train" "$text/$file"
  elif [ -n "$from" ]; then
    take "$file" "$file" || die "--from has neither $from/$file nor $file.gz$([ $split != train ] || echo "; another training text may be given as --train")"
  else
    fetch "$text/$file" "$url/json_data/$file" is_blob "${blob[$file]}"
  fi
  original "$file"
  pairs "$split" context
  pairs "$split" response
done

# Several references for each test context: wanted, not needed.
file=test_multi_ref.json
single="without $file evaluate.sh scores against the one true response"
if [ -n "$from" ]; then
  take "$file" "$file" || echo "prepare.sh: --from has no $file; $single" >&2
else
  (fetch "$text/$file" "$url/$file" is_blob "${blob[$file]}") ||
    echo "prepare.sh: $single; running prepare.sh again tries again" >&2
fi
if [ -f "$text/$file" ]; then
  original "$file"
  make "$text/test.references" dialog references "$text/$file" --responses "$text/test.response" ||
    { rm -f "$text/$file"; echo "prepare.sh: $single" >&2; }
fi

make "$text/dict.txt" dialog dictionary "$text/train.jsonl" --types "$types"
binarize "$out" dict.response.txt --source-lang context --target-lang response --joined-dictionary --srcdict "$text/dict.txt" \
  --trainpref "$text/train" --validpref "$text/valid" --testpref "$text/test"
summary() { # summary SPLIT: its pairs and target tokens with </s>, as fairseq-preprocess counted them
  sed -n "s|^\[response\] .*/$1\.response: \([0-9]*\) sents, \([0-9]*\) tokens, \([0-9.e-]*%\).*|$1 \1 pairs, \2 tokens (\3 unknown)|p" \
    "$out/preprocess.log" | tail -n 1
}
echo "prepare.sh: $out is ready: dictionary of $(($(lines "$out/dict.response.txt") + 4)) entries; $(summary train); $(summary valid); $(summary test)"
