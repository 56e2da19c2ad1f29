# What prepare.sh of multi30k, wmt14_en_de and wmt14_en_fr share; they source it, with $root set, and set $target. In $text:
#   raw.SPLIT.LANG -> tok.SPLIT.LANG (train cleaned where asked) -> words -> codes or spm.model -> bpe.SPLIT.LANG -> $out

source "$root/examples/lib/recipes.sh"

parallel() { python "$root/examples/lib/prepare_parallel.py" "$@"; }
both() { [ -f "$text/$1.en" ] && [ -f "$text/$1.$target" ]; } # whether the text is there in both languages

translation_options() { # translation_options "NAME..." ARGUMENT...: as options, and whether their values are allowed
  options "from out merges bpe workers $1" "${@:2}"
  positive --merges "$merges"
  positive --workers "$workers"
  case $bpe in subword-nmt | sentencepiece) ;; *) die "--bpe is '$bpe', allowed are subword-nmt and sentencepiece" ;; esac
  from_folder
}

needs() { # needs DISK MEMORY MINUTES: told before anything starts; MINUTES of one processor core
  [ ! -f "$out/dict.$target.txt" ] || return 0
  local free
  free=$(df -Pk "$out" | awk 'END { print int($4 / 1048576) }')
  echo "prepare.sh: needs $1 GB of disk in $out ($free GB are free), $2 GB of memory, and with --workers $workers about" \
    "$(awk -v minutes="$3" -v workers="$workers" 'BEGIN { printf "%.1f", (minutes / workers + minutes / 10) / 60 }')" \
    "hours${4:+ $4}" >&2
  [ "$free" -ge "$1" ] || echo "prepare.sh: that is more disk than is free; it goes on where it stopped when there is more" >&2
}

# -------------------------------------------------------------------------------------------- archives of statmt.org

mirrors=${WMT_URL:-https://www.statmt.org https://statmt.org https://data.statmt.org}
declare -A md5=([test-full.tgz]=${WMT14_TEST_MD5-a8cd784e006feb32ac6f3d9ec7eb389a}) # as sacrebleu has it

archive() { # archive PATH NAME...: $archive, which is whole, holds the files NAME, and is the same as in an earlier run
  local path=$1 name=${1##*/} urls="" mirror sum pinned
  shift
  for mirror in $mirrors; do urls+="${urls:+ }$mirror/$path"; done
  if [ -n "$from" ]; then
    archive=$from/$path
    [ -f "$archive" ] || archive=$from/$name
    [ -f "$archive" ] || die "--from $from has no $name; it is at ${urls// / or }"
    parallel check "$@" "$archive"
  else
    archive=$text/$name
    fetch "$archive" "$urls" parallel check --md5 "${md5[$name]-}" "$@"
  fi
  sum=$(checksum sha256 "$archive")
  pinned=$([ ! -f "$text/checksums" ] || awk -v name="$name" '$2 == name { print $1 }' "$text/checksums")
  if [ -z "$pinned" ]; then
    { [ ! -f "$text/checksums" ] || cat "$text/checksums"; echo "$sum  $name"; } >"$text/checksums.part"
    mv "$text/checksums.part" "$text/checksums"
  fi
  [ "${pinned:-$sum}" = "$sum" ] || die "$archive is not the file that $out was begun with; remove $out to begin again"
}
from_archives() { # from_archives SPLIT "PATH NAME NAME"...: $text/raw.SPLIT.{en,$target} out of files of archives
  local split=$1 source path first second sources=() strict=--strict
  shift
  ! both "raw.$split" || return 0
  for source; do
    read -r path first second <<<"$source"
    archive "$path" "$first" "$second"
    sources+=("$archive:$first:$second")
  done
  [ "$split" != train ] || strict="" # the cleaning drops what is not UTF-8
  echo "prepare.sh: $text/raw.$split" >&2
  parallel extract "$text/raw.$split" en "$target" "${sources[@]}" $strict
}
expect() { # expect TRAIN VALID TEST: as many lines as the original has, or a word of it
  local split
  for split in train valid test; do
    [ "$(lines "$text/raw.$split.en")" = "$1" ] ||
      echo "prepare.sh: not the original: $text/raw.$split.en has $(lines "$text/raw.$split.en") lines, not $1" >&2
    shift
  done
}

# ---------------------------------------------------------------------------------------------------- from raw text

subwords() { # subwords [--clean|--lower-case]: from $text/raw.* to binarized data; only train is cleaned
  local split lang model lower_case=""
  [ "$*" != --lower-case ] || lower_case=--lower-case
  for split in train valid test; do
    both "tok.$split" && continue
    echo "prepare.sh: $text/tok.$split" >&2
    if [ "$split $*" = "train --clean" ]; then
      parallel tokenize "$text/raw.$split" "$text/tok.$split" en "$target" --workers "$workers" --clean >"$text/cleaned.part"
      mv "$text/cleaned.part" "$text/cleaned"
      cat "$text/cleaned" >&2
    else
      parallel tokenize "$text/raw.$split" "$text/tok.$split" en "$target" --workers "$workers" $lower_case
    fi
  done

  # Of both languages together, because all embeddings are shared; from the words and their counts, which fit in memory.
  [ -f "$text/words" ] || echo "prepare.sh: $text/words" >&2
  [ -f "$text/words" ] || parallel words "$text/tok.train.en" "$text/tok.train.$target" --output "$text/words" --workers "$workers"
  case $bpe in
    subword-nmt)
      model=$text/codes
      make "$model" subword-nmt learn-bpe --symbols "$merges" --dict-input --input "$text/words" ||
        die "subword-nmt could not make $model, see above; running it again goes on" ;;
    sentencepiece)
      model=$text/spm.model
      [ -f "$model" ] || echo "prepare.sh: $model" >&2
      [ -f "$model" ] || parallel sentencepiece "$text/words" "$model" --size "$merges" ;;
  esac
  for split in train valid test; do
    for lang in en "$target"; do
      [ ! -f "$text/bpe.$split.$lang" ] || continue
      echo "prepare.sh: $text/bpe.$split.$lang" >&2
      parallel subwords "$model" "$text/tok.$split.$lang" "$text/bpe.$split.$lang" --workers "$workers"
      [ "$(lines "$text/bpe.$split.$lang")" = "$(lines "$text/tok.$split.$lang")" ] ||
        die "$text/bpe.$split.$lang and tok.$split.$lang differ in their number of lines; remove $out and run it again"
    done
  done

  # One dictionary. fairseq orders it by frequency over both languages, as Mixtape's gate sharing needs: its first half
  # gets gates of its own.
  binarize "$out" "dict.$target.txt" --source-lang en --target-lang "$target" --joined-dictionary \
    --trainpref "$text/bpe.train" --validpref "$text/bpe.valid" --testpref "$text/bpe.test"
  rm -f "$out/preprocess.log" # the same text gives the same files, wherever they are
  echo "prepare.sh: $out is ready: $(lines "$text/bpe.train.en") training pairs, $(lines "$out/dict.$target.txt") subwords"
}
