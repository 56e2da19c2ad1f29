# What examples/{ptb,wikitext2,one_billion_word,text8} share; their scripts source it, with $root set.
# Every file appears under its name only when it is whole, so that a rerun continues where the last one stopped.

die() { echo "${0##*/}: $*" >&2; exit 1; }

venv=${MIXTAPE_VENV:-$root/.venv}
[ ! -d "$venv/bin" ] || PATH=$(cd "$venv" && pwd)/bin:$PATH
export PYTHONUTF8=1 # the tools would otherwise follow the locale

lines() { wc -l <"$1" | tr -d ' '; }
positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2', allowed is a positive whole number"; }

# ------------------------------------------------------------------------------------------------------ prepare.sh

make() { # make FILE COMMAND...: FILE holds what COMMAND prints
  local file=$1
  shift
  [ ! -f "$file" ] || return 0
  echo "prepare.sh: $file" >&2
  "$@" >"$file.part" && mv "$file.part" "$file"
}
begin() { # begin OUT SETTINGS: the folder $text for the text, which remembers how it was made
  command -v fairseq-preprocess >/dev/null || die "fairseq-preprocess is not installed; scripts/setup.sh sets up all that is needed"
  text=$1/text
  mkdir -p "$text"
  [ -f "$text/settings" ] || echo "$2" >"$text/settings"
  [ "$(cat "$text/settings")" = "$2" ] ||
    die "$1 was prepared with other settings ($(cat "$text/settings")); choose another --out or remove it"
}
checksum() { # checksum md5|sha256 FILE
  python -c 'import hashlib, sys
digest = hashlib.new(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
print(digest.hexdigest())' "$1" "$2"
}
sums() { [ "$(checksum "$1" "$3")" = "$2" ]; } # sums md5|sha256 SUM FILE: whether FILE is the right one
fetch() { # fetch FILE URL TEST...: goes on with FILE.part where there is one; FILE appears when TEST FILE.part holds
  local file=$1 url=$2 status=0
  shift 2
  [ ! -f "$file" ] || return 0
  command -v curl >/dev/null || die "curl is not installed; download $url yourself and give its folder as --from"
  # A part that is already whole is not asked for again.
  [ -f "$file.part" ] && "$@" "$file.part" 2>/dev/null ||
    curl --fail --location --retry 3 --continue-at - --output "$file.part" "$url" || status=$?
  if [ -f "$file.part" ] && "$@" "$file.part"; then mv "$file.part" "$file"; return; fi
  # Whole as the server sees it (0; 22, 33, 36: nothing left to ask for), and yet wrong: the next try starts afresh.
  case $status in 0 | 22 | 33 | 36) rm -f "$file.part" ;; esac
  die "$url could not be downloaded whole; run it again, or give a local copy as --from"
}
zip_test() { python -m zipfile -t "$1" 2>/dev/null | grep -x 'Done testing' >/dev/null; }
zip_member() { # zip_member ZIP NAME: the content of the one file of that name, in whichever folder
  python -c 'import shutil, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in archive.namelist() if name.split("/")[-1] == sys.argv[2]]
shutil.copyfileobj(archive.open(name), sys.stdout.buffer)' "$1" "$2" 2>/dev/null
}
local_copy() { # local_copy FOLDER NAME...: the first that is there, plain or .gz
  local folder=$1 name ending
  shift
  for name; do
    for ending in "" .gz; do
      [ ! -f "$folder/$name$ending" ] || { echo "$folder/$name$ending"; return; }
    done
  done
  return 1
}
plain() { # no carriage returns, and a last line that ends: what counts as a line is then the same for every tool
  case $1 in *.gz) gzip -dc "$1" ;; *) cat "$1" ;; esac | iconv -f UTF-8 -t UTF-8 | tr -d '\r' | awk 1
}
take() { # take SPLIT NAME...: $text/SPLIT out of the folder --from
  local split=$1 source
  shift
  [ ! -f "$text/$split" ] || return 0
  source=$(local_copy "$from" "$@") || return 1
  make "$text/$split" plain "$source" || die "$source cannot be read as UTF-8 text"
  [ -s "$text/$split" ] || { rm "$text/$split"; die "$source is empty"; }
}
binarize() { # binarize FOLDER FLAGS...: fairseq-preprocess with the dictionary $dict
  local folder=$1
  shift
  [ ! -f "$folder/dict.txt" ] || return 0
  rm -rf "$folder/binarizing"
  # No padding of the dictionary: every symbol of it is one of the text.
  fairseq-preprocess --only-source --padding-factor 1 --srcdict "$dict" --workers "$workers" --destdir "$folder/binarizing" "$@"
  mv "$folder"/binarizing/{preprocess.log,*.bin,*.idx} "$folder/"
  mv "$folder/binarizing/dict.txt" "$folder/" # last: fairseq-train takes no data without it
  rm -r "$folder/binarizing"
}
dictionary() { # dictionary FLAGS...: $dict, of the texts given, most frequent words first; nothing where --dict gave one
  [ -z "$dict" ] || return 0
  dict=$text/dict.txt
  [ -f "$dict" ] || python "$root/scripts/make_dictionary.py" "$@" --output "$dict"
}
tokens() { # tokens FOLDER SPLIT: as fairseq-preprocess counted them, with </s>
  sed -n "s|^\[None\] .*/$2: [0-9]* sents, \([0-9]*\) tokens.*|\1|p" "$1/preprocess.log" | tail -n 1
}

summary() { # summary OUT TYPES TRAIN VALID TEST: what was made, and whether it is what the papers have
  local folder=$1 types found expected split
  shift
  types=$(($(lines "$folder/dict.txt") + 2)) # and <unk> and </s>; <s> and <pad> are never predicted
  found="$types types" expected="$1 types"
  shift
  for split in train valid test; do
    [ ! -f "$folder/$split.bin" ] || found+=", $split $(tokens "$folder" "$split")" expected+=", $split $1"
    shift
  done
  [ "$found" = "$expected" ] || [ "$dict" != "$text/dict.txt" ] || # the types of another text's dictionary say nothing
    echo "prepare.sh: not the papers' text, which has (tokens with </s>) $expected" >&2
  echo "prepare.sh: $folder is ready: dictionary of $((types + 2)) entries, of which <s> and <pad> do not count; tokens with </s>: $found"
}

# ----------------------------------------------------------------------------------------------------- evaluate.sh

perplexity() { # perplexity SPLIT COLUMNS UNIT FLAGS...: fairseq-eval-lm of $save/checkpoint_best.pt, into $save/SPLIT.txt
  local split=$1 columns=$2 unit=$3 log=$save/eval.$1.log count bits
  shift 3
  fairseq-eval-lm "$data" --user-dir "$root/mixtape_plugin" --task bptt_language_modeling --path "$save/checkpoint_best.pt" \
    --gen-subset "$split" --batch-size "$columns" --log-format simple --log-interval 1000 "$@" >"$log" 2>&1 ||
    die "fairseq-eval-lm failed: $(tail -n 1 "$log")"
  count=$(sed -n 's/.*Evaluated \([0-9,]*\) tokens.*/\1/p' "$log")
  bits=$(sed -n 's/.*Loss (base 2): \([0-9.]*\), Perplexity: \([0-9.]*\).*/\1 bits a '"$unit"', perplexity \2/p' "$log")
  [ -n "$bits" ] || die "fairseq-eval-lm gave no perplexity; see $log"
  echo "$split: $count ${unit}s, $bits" >"$save/$split.txt.part"
  mv "$save/$split.txt.part" "$save/$split.txt"
  cat "$save/$split.txt"
}

# -------------------------------------------------------------------------------------------------------- options

train_options() { # train_options NAME "LAYER..." ARGUMENT...: $layer $data $save $seed $finetune $extra out of train.sh's arguments
  local layers=$2 found
  case ${3-} in -h | --help) echo "$usage"; exit ;; esac
  data=data-bin/$1 save="" seed="" finetune="" layer="" extra=()
  for found in $layers; do [ "$found" != "${3-}" ] || layer=$found; done
  [ -n "$layer" ] || die "the output layer is '${3-}', allowed are ${layers// /, }; see train.sh --help"
  shift 3
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) echo "$usage"; exit ;;
      --data | --save | --seed)
        [ $# -gt 1 ] || die "$1 needs a value; see train.sh --help"
        case $1 in --data) data=$2 ;; --save) save=$2 ;; --seed) seed=$2 ;; esac
        shift 2 ;;
      *)
        if [[ $1 = --finetune && $usage = *--finetune* ]]; then finetune=1; else extra+=("$1"); fi
        shift ;;
    esac
  done
}

evaluate_options() { # evaluate_options NAME ARGUMENT...: $save $data $modes $extra out of evaluate.sh's arguments
  case ${2-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
  save=$2 data=data-bin/$1 modes="" extra=()
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) echo "$usage"; exit ;;
      --data) [ $# -gt 1 ] || die "--data needs a value; see evaluate.sh --help"; data=$2; shift ;;
      *)
        case "$1 $usage" in
          "--dynamic "*--dynamic*) modes+=" dynamic_evaluation" ;;
          "--cache "*--cache*) modes+=" cache_pointer" ;;
          *) extra+=("$1") ;;
        esac ;;
    esac
    shift
  done
  [ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
}

adapt() { # adapt DATASET: the test text by each of $modes with the papers' settings for DATASET; nothing without any
  local script
  [ -n "$modes" ] || return 0
  for script in $modes; do
    python "$root/scripts/$script.py" "$data" --path "$save/checkpoint_best.pt" --dataset "$1" --subset test \
      "${extra[@]+"${extra[@]}"}" | tee "$save/$script.txt.part"
    mv "$save/$script.txt.part" "$save/$script.txt"
  done
  exit
}
