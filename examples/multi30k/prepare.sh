#!/usr/bin/env bash
# Multi30k task 1 (English to German or French) for fairseq: raw text -> Moses tokens -> joint BPE -> binarized data.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--target de|fr] [--out DIR] [--merges N] [--bpe subword-nmt|sentencepiece]
                  [--case keep|lower] [--workers N]
  --from DIR    take {train,val,test_2016_flickr}.{en,de,fr}, plain or .gz, from DIR instead of downloading them
  --target L    target language, de (default) or fr
  --out DIR     binarized data, the text in DIR/text (default: data-bin/multi30k.en-L)
  --merges N    BPE merges (of sentencepiece: subwords), learned on both languages together (default: 10000)
  --bpe TOOL    subword-nmt (default) or sentencepiece
  --case C      keep (default), or lower: as most papers on Multi30k have it
  --workers N   processes (default: 2); the data is the same with any number of them"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/translation.sh"

from="" target=de out="" merges=10000 bpe=subword-nmt case=keep workers=2
translation_options "target case" "$@"
case $target in de | fr) ;; *) die "--target is '$target', allowed are de and fr" ;; esac
case $case in keep | lower) ;; *) die "--case is '$case', allowed are keep and lower" ;; esac
out=${out:-data-bin/multi30k.en-$target}
url=${MULTI30K_URL:-https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw}
begin "$out" "from ${from:-$url}, target $target, merges $merges, $bpe$([ $case = keep ] || echo ", lower case")"

has_lines() { [ "$(lines "$2")" = "$1" ]; } # has_lines NUMBER FILE
gzip_test() { gzip -t <"$1"; }
declare -A name=([train]=train [valid]=val [test]=test_2016_flickr) size=([train]=29000 [valid]=1014 [test]=1000)
for split in train valid test; do
  for lang in en "$target"; do
    file=${name[$split]}.$lang raw=$text/raw.$split.$lang
    if [ -n "$from" ]; then
      take "raw.$split.$lang" "$file" || die "--from has neither $from/$file nor $file.gz"
    else
      [ -f "$raw" ] || fetch "$text/$file.gz" "$url/$file.gz" gzip_test
      make "$raw" plain "$text/$file.gz" || die "$text/$file.gz cannot be read as UTF-8 text"
      [ "$(lines "$raw")" = "${size[$split]}" ] ||
        die "$raw has $(lines "$raw") lines, Multi30k has ${size[$split]}; remove $out and run it again"
    fi
  done
  [ "$(lines "$text/raw.$split.en")" = "$(lines "$text/raw.$split.$target")" ] ||
    die "$split has $(lines "$text/raw.$split.en") lines of en and $(lines "$text/raw.$split.$target") of $target; they must be translations line by line"
done

# The data set's own normalized, tokenized, lower-cased references, which papers score against: wanted, not needed.
tokens=lower-cased-tokens.test.$target file=test_2016_flickr.lc.norm.tok.$target
if [ -n "$from" ]; then
  take "$tokens" "$file" || echo "prepare.sh: --from has no $file, without which evaluate.sh cannot print the BLEU that papers print" >&2
else
  (fetch "$text/$tokens" "${url%/raw}/tok/$file" has_lines 1000) ||
    echo "prepare.sh: without $file evaluate.sh cannot print the BLEU that papers print; running prepare.sh again tries again" >&2
fi

if [ "$case" = lower ]; then subwords --lower-case; else subwords; fi
