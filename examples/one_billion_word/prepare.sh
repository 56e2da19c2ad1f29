#!/usr/bin/env bash
# One Billion Word (Chelba et al. 2013) for fairseq as the MoS and Mixtape papers have it: lower-case, 100,000 types.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from PATH] [--out DIR] [--shards N] [--types N] [--workers N]
  --from PATH    the original archive (.tar.gz), or the folder that holds it or that it was unpacked to (default: download)
  --out DIR      binarized data in DIR/shard00, DIR/shard01, …, the text in DIR/text (default: data-bin/one_billion_word)
  --shards N     only the first N of the 99 training shards (default: 99)
  --types N      vocabulary, <unk> and </s> included (default: 100000)
  --workers N    processes of fairseq-preprocess (default: 2)"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/language_modeling.sh"

from="" out=data-bin/one_billion_word shards=99 types=100000 dict="" workers=2
options "from out shards types workers" "$@"
for option in shards types workers; do positive "--$option" "${!option}"; done
[ "$shards" -le 99 ] || die "--shards is $shards, allowed is 1 to 99"
[ "$types" -gt 2 ] || die "--types is $types, allowed is 3 or more"
[ -z "$from" ] || [ -r "$from" ] || die "--from $from cannot be read"
[ -z "$from" ] || from=$(python -c 'import os, sys; print(os.path.abspath(sys.argv[1]))' "$from")
archive=1-billion-word-language-modeling-benchmark-r13output.tar.gz
url=${ONE_BILLION_URL:-http://www.statmt.org/lm-benchmark}/$archive
begin "$out" "from ${from:-$url}, shards $shards, types $types"

if [ -z "$from" ]; then
  fetch "$text/$archive" "$url" sums sha256 "${ONE_BILLION_SHA256:-01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e}"
  from=$text/$archive
elif [ -f "$from/$archive" ]; then
  from=$from/$archive
fi

# $text/train.00, … and $text/heldout.00, …, lower-case
python "$root/examples/lib/prepare_one_billion_word.py" "$from" "$text" --shards "$shards"
make "$text/valid" cat "$text"/heldout.{00,10}
make "$text/test" cat "$text"/heldout.{20,30,40}
dictionary "$text"/train.?? --types "$types"

for ((i = 0; i < shards; i++)); do
  shard=$(printf %02d "$i") evaluation=()
  mkdir -p "$out/shard$shard"
  [ "$i" -gt 0 ] || evaluation=(--validpref "$text/valid" --testpref "$text/test")
  binarize_text "$out/shard$shard" --trainpref "$text/train.$shard" "${evaluation[@]+"${evaluation[@]}"}"
done

train=0
for folder in "$out"/shard*; do train=$((train + $(tokens "$folder" "train\.[0-9]*"))); done
found=$(($(lines "$out/shard00/dict.txt") + 2)) # and <unk> and </s>; <s> and <pad> are never predicted
[ "$found" -eq "$types" ] || echo "prepare.sh: the training text has only $found types, --types asks for $types" >&2
echo "prepare.sh: $out is ready: $shards shards, $found types; tokens with </s>: train $train," \
  "valid $(tokens "$out/shard00" valid), test $(tokens "$out/shard00" test)"
