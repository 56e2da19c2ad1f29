#!/usr/bin/env bash
# text8 (the first 100M characters of a cleaned Wikipedia; Mahoney 2011) for fairseq: a token for each character.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--out DIR] [--characters TRAIN,VALID,TEST] [--workers N]
  --from DIR         take text8, text8.gz or text8.zip from DIR instead of downloading
  --out DIR          binarized data, the text in DIR/text (default: data-bin/text8)
  --characters L     lengths of the three parts, in this order (default: 90000000,5000000,5000000)
  --workers N        processes of fairseq-preprocess (default: 2)"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/language_modeling.sh"

from="" out=data-bin/text8 characters=90000000,5000000,5000000 dict="" workers=2
options "from out characters workers" "$@"
positive --workers "$workers"
[[ $characters =~ ^([1-9][0-9]{0,11},){2}[1-9][0-9]{0,11}$ ]] ||
  die "--characters is '$characters', allowed are three positive whole numbers with commas between them"
IFS=, read -r train valid test <<<"$characters"
from_folder
url=${TEXT8_URL:-http://mattmahoney.net/dc/text8.zip}
begin "$out" "from ${from:-$url}, characters $characters"

if { [ -z "$from" ] || ! take text8 text8; } && [ ! -f "$text/text8" ]; then
  archive=${from:-$text}/text8.zip
  [ -n "$from" ] || fetch "$archive" "$url" zip_test
  [ -f "$archive" ] || die "--from has none of $from/text8, text8.gz and text8.zip"
  make "$text/text8" zip_member "$archive" text8 || die "$archive holds no text8 that can be read"
fi
size=$(tr -d '\n' <"$text/text8" | LC_ALL=C tr -cd 'a-z ' | wc -c)
total=$(tr -d '\n' <"$text/text8" | wc -c)
[ "$size" -eq "$total" ] || die "$text/text8 is not text8: $((total - size)) of its bytes are neither a to z nor the space"
[ "$total" -ge $((train + valid + test)) ] ||
  die "$text/text8 has $((total)) characters, --characters $characters asks for $((train + valid + test))"
[ -n "$from" ] || sums md5 3bea1919949baf155f99411df5fada7e "$text/text8" ||
  die "$text/text8 is not the text8 of the papers; remove $out and run it again"

part() { # part BEGIN LENGTH: tokens in lines of 10,000, because fairseq holds a line in memory
  tr -d '\n' <"$text/text8" | { head -c $(($1 + $2)); cat >/dev/null; } | tail -c "$2" | tr ' ' _ | fold -b -w 10000 | LC_ALL=C sed 's/./& /g' | awk 1
}
make "$text/train" part 0 "$train"
make "$text/valid" part "$train" "$valid"
make "$text/test" part $((train + valid)) "$test"

dictionary "$text"/{train,valid,test}
binarize_text "$out" --trainpref "$text/train" --validpref "$text/valid" --testpref "$text/test"
symbols=$(lines "$out/dict.txt")
[ "$symbols" -eq 27 ] || echo "prepare.sh: text8 has 27 symbols, this text $symbols" >&2
echo "prepare.sh: $out is ready: $symbols symbols, $train training, $valid validation and $test test characters"
