#!/usr/bin/env bash
# Multi30k task 1 (English to German or French) for fairseq: raw text -> Moses tokens -> joint BPE -> binarized data.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--target de|fr] [--out DIR] [--merges N]
  --from DIR    take {train,val,test_2016_flickr}.{en,de,fr}, plain or .gz, from DIR instead of downloading them
  --target L    target language, de (default) or fr
  --out DIR     binarized data, the text in DIR/text (default: data-bin/multi30k.en-L)
  --merges N    BPE merges, learned on both languages together (default: 4000)"
die() { echo "prepare.sh: $*" >&2; exit 1; }

from="" target=de out="" merges=4000
while [ $# -gt 0 ]; do
  case $1 in -h | --help) echo "$usage"; exit ;; esac
  [ $# -gt 1 ] || die "$1 needs a value, or is no option; see prepare.sh --help"
  case $1 in
    --from) from=$2 ;; --target) target=$2 ;; --out) out=$2 ;; --merges) merges=$2 ;;
    *) die "unknown option $1; see prepare.sh --help" ;;
  esac
  shift 2
done
case $target in de | fr) ;; *) die "--target is '$target', allowed are de and fr" ;; esac
[[ $merges =~ ^[1-9][0-9]*$ ]] || die "--merges is '$merges', allowed is a positive whole number"
[ -z "$from" ] || { [ -d "$from" ] && from=$(cd "$from" && pwd); } || die "--from $from is no folder that can be read"
out=${out:-data-bin/multi30k.en-$target}
url=${MULTI30K_URL:-https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw}

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${MIXTAPE_VENV:-$root/.venv}
[ ! -d "$venv/bin" ] || PATH=$(cd "$venv" && pwd)/bin:$PATH
export PYTHONUTF8=1 # the tools would otherwise follow the locale
for tool in sacremoses subword-nmt fairseq-preprocess; do
  command -v "$tool" >/dev/null || die "$tool is not installed; scripts/quickstart.sh sets up all that is needed"
done

text=$out/text
mkdir -p "$text"
settings="from ${from:-$url}, target $target, merges $merges"
[ -f "$text/settings" ] || echo "$settings" >"$text/settings"
[ "$(cat "$text/settings")" = "$settings" ] ||
  die "$out was prepared with other settings ($(cat "$text/settings")); choose another --out or remove it"

make() { # make FILE COMMAND...: FILE holds what COMMAND prints
  local file=$1
  shift
  [ ! -f "$file" ] || return 0
  echo "prepare.sh: $file" >&2
  "$@" >"$file.part" && mv "$file.part" "$file"
}
lines() { wc -l <"$1" | tr -d ' '; }
fetch() { # a part that is already whole is not asked for again
  local status=0
  gzip -t "$1.part" 2>/dev/null || curl --fail --location --retry 3 --continue-at - --output "$1.part" "$url/${1##*/}" || status=$?
  if gzip -t "$1.part"; then mv "$1.part" "$1"; return; fi
  # Whole as the server sees it (0; 22, 33, 36: nothing left to ask for), and yet broken: the next try starts afresh.
  case $status in 0 | 22 | 33 | 36) rm -f "$1.part" ;; esac
  return 1
}
raw() { # no carriage returns, and a last line that ends: what counts as a line is then the same for every tool
  case $1 in *.gz) gzip -dc "$1" ;; *) cat "$1" ;; esac | iconv -f UTF-8 -t UTF-8 | tr -d '\r' | awk 1
}

declare -A name=([train]=train [valid]=val [test]=test_2016_flickr) size=([train]=29000 [valid]=1014 [test]=1000)
for split in train valid test; do
  for lang in en "$target"; do
    file=$text/raw.$split.$lang source=${from:-$text}/${name[$split]}.$lang
    if [ ! -f "$file" ]; then
      if [ -z "$from" ]; then
        source=$source.gz
        [ -f "$source" ] || fetch "$source" || die "$url/${source##*/} could not be downloaded whole; run it again"
      elif [ ! -f "$source" ]; then
        source=$source.gz
        [ -f "$source" ] || die "--from has neither ${source%.gz} nor ${source##*/}"
      fi
      make "$file" raw "$source" || die "$source cannot be read as UTF-8 text"
    fi
    [ -n "$from" ] || [ "$(lines "$file")" = "${size[$split]}" ] ||
      die "$file has $(lines "$file") lines, Multi30k has ${size[$split]}; remove $out and run it again"
  done
  [ "$(lines "$text/raw.$split.en")" = "$(lines "$text/raw.$split.$target")" ] ||
    die "$split has $(lines "$text/raw.$split.en") lines of en and $(lines "$text/raw.$split.$target") of $target; they must be translations line by line"
done

moses() { sacremoses -q -l "$1" normalize tokenize <"$2"; }
for split in train valid test; do
  for lang in en "$target"; do make "$text/tok.$split.$lang" moses "$lang" "$text/raw.$split.$lang"; done
done

make "$text/bpe.train.both" cat "$text/tok.train.en" "$text/tok.train.$target"
make "$text/codes" subword-nmt learn-bpe --symbols "$merges" --input "$text/bpe.train.both"
for split in train valid test; do
  for lang in en "$target"; do
    make "$text/bpe.$split.$lang" subword-nmt apply-bpe --codes "$text/codes" --input "$text/tok.$split.$lang"
    [ "$(lines "$text/bpe.$split.$lang")" = "$(lines "$text/raw.$split.$lang")" ] ||
      die "$text/bpe.$split.$lang and raw.$split.$lang differ in their number of lines; remove $out and run it again"
  done
done

# One dictionary, because all embeddings are shared. fairseq orders it by frequency over both languages, as Mixtape's gate
# sharing needs: its first half gets gates of its own. No padding: every symbol of the vocabulary is one of the text.
if [ ! -f "$out/dict.$target.txt" ]; then
  rm -rf "$out/binarizing"
  fairseq-preprocess --source-lang en --target-lang "$target" --joined-dictionary --padding-factor 1 --workers 2 \
    --trainpref "$text/bpe.train" --validpref "$text/bpe.valid" --testpref "$text/bpe.test" --destdir "$out/binarizing"
  mv "$out"/binarizing/{train,valid,test}.* "$out/binarizing/dict.en.txt" "$out/"
  mv "$out/binarizing/dict.$target.txt" "$out/" # last: fairseq-train takes no data without it
  rm -r "$out/binarizing"
fi
echo "prepare.sh: $out is ready: $(lines "$text/raw.train.en") training pairs, $(lines "$out/dict.$target.txt") subwords"
