# What the scripts of all examples share; they source it, or a file that does, with $root set.
# Every file appears under its name only when it is whole, so that a rerun continues where the last one stopped.

die() { echo "${0##*/}: $*" >&2; exit 1; }

unset CDPATH # with it cd may go elsewhere, and print where
venv=$(cd "$root" && cd "${MIXTAPE_VENV:-.venv}" 2>/dev/null && pwd) || venv=""
[ -n "$venv" ] || [ -z "${MIXTAPE_VENV-}" ] || die "MIXTAPE_VENV is $MIXTAPE_VENV, which is no folder; scripts/setup.sh sets up all that is needed"
PATH=${venv:+$venv/bin:}$PATH
export PYTHONUTF8=1 # the tools would otherwise follow the locale
export PYTHONUNBUFFERED=1 # else a line of a log may come between a translation and its end

lines() { wc -l <"$1" | tr -d ' '; }
positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2', allowed is a positive whole number"; }

# ------------------------------------------------------------------------------------------- options of prepare.sh

options() { # options "NAME..." ARGUMENT...: $NAME of each --NAME VALUE
  local names=" $1 "
  shift
  while [ $# -gt 0 ]; do
    case $1 in -h | --help) echo "$usage"; exit ;; esac
    [[ $1 = --* && $names = *" ${1#--} "* ]] || die "unknown option $1; see prepare.sh --help"
    [ $# -gt 1 ] && [[ $2 != --* ]] || die "$1 needs a value; see prepare.sh --help"
    [ -n "$2" ] || die "$1 is empty; see prepare.sh --help"
    printf -v "${1#--}" %s "$2"
    shift 2
  done
}
from_folder() { # $from as an absolute path
  [ -z "$from" ] || { [ -d "$from" ] && from=$(cd "$from" && pwd); } || die "--from $from is no folder that can be read"
}

# ----------------------------------------------------------------------------------------------- files of prepare.sh

make() { # make FILE COMMAND...: FILE holds what COMMAND prints
  local file=$1
  shift
  [ ! -f "$file" ] || return 0
  echo "prepare.sh: $file" >&2
  "$@" >"$file.part" && mv "$file.part" "$file"
}
begin() { # begin OUT SETTINGS: the folder $text for the text, which remembers how it was made
  command -v fairseq-preprocess >/dev/null || die "fairseq-preprocess is not installed; scripts/setup.sh sets up all that is needed"
  case $1 in *[,:]*) die "--out $1 has a comma or a colon, at which fairseq takes a name apart: choose another one" ;; esac
  text=$1/text
  mkdir -p "$text"
  # Settings bind once a file was made by them: after a failed download others are welcome, such as --from.
  if [ ! -f "$text/settings" ] || [ -z "$(find "$text" -type f ! -name settings ! -name '*.part' -print -quit)" ]; then
    echo "$2" >"$text/settings.part"
    mv "$text/settings.part" "$text/settings"
  fi
  [ "$(cat "$text/settings")" = "$2" ] ||
    die "$1 was prepared with other settings ($(cat "$text/settings")); choose another --out or remove it"
}
preprocess() { # preprocess FLAG...: fairseq-preprocess; of what it says, the last line where it fails, without a file for it
  local said
  said=$(fairseq-preprocess "$@" 2>&1 | tail -n 1) || die "fairseq-preprocess failed ($?): $said; running it again goes on from $text"
}
# binarize FOLDER DICTIONARY FLAG...: fairseq-preprocess; its files come to FOLDER when all are there, DICTIONARY the last, since
# fairseq-train takes no data without it; nothing where that is there. No padding of it: every symbol is one of the text
binarize() {
  local folder=$1 dictionary=$2 file
  shift 2
  [ ! -f "$folder/$dictionary" ] || return 0
  echo "prepare.sh: $folder/binarizing" >&2
  rm -rf "$folder/binarizing"
  preprocess --padding-factor 1 --workers "$workers" "$@" --destdir "$folder/binarizing"
  for file in "$folder"/binarizing/*; do
    [ "${file##*/}" = "$dictionary" ] || mv "$file" "$folder/"
  done
  mv "$folder/binarizing/$dictionary" "$folder/"
  rm -r "$folder/binarizing"
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
fetch() { # fetch FILE "URL..." TEST...: from the first URL that works; FILE appears when TEST FILE.part holds
  local file=$1 urls=$2 url code status
  shift 2
  [ ! -f "$file" ] || return 0
  command -v curl >/dev/null || die "curl is not installed; download ${urls// / or } yourself and give its folder as --from"
  for url in $urls; do
    status=0 code=0
    # Goes on with a part where there is one; one that is already whole is not asked for again.
    if ! { [ -f "$file.part" ] && "$@" "$file.part" 2>/dev/null; }; then
      echo "prepare.sh: $url" >&2
      code=$(curl --fail --location --retry 3 --progress-bar --continue-at - --write-out '%{http_code}' --output "$file.part" "$url") || status=$?
    fi
    if [ -f "$file.part" ] && "$@" "$file.part"; then mv "$file.part" "$file"; return; fi
    # Whole as the server sees it (0; 33, 36 and HTTP's 416: nothing left to ask for), and yet wrong: start afresh.
    case $status.$code in
      0.* | 33.* | 36.* | 22.416) rm -f "$file.part" ;;
      23.*) die "$file.part cannot be written, the disk is full perhaps; what is there is kept, and running it again goes on" ;;
    esac
  done
  die "${urls// / and } could not be downloaded whole; run it again, or give a local copy as --from"
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
plain() { # no mark of the byte order, no carriage returns, and a last line that ends: a line is then the same for every tool
  case $1 in *.gz) gzip -dc "$1" ;; *) cat "$1" ;; esac | iconv -f UTF-8 -t UTF-8 | sed $'1s/^\xef\xbb\xbf//' | tr -d '\r' | awk 1
}
copy() { # copy SOURCE FILE: FILE holds SOURCE; what was made of another SOURCE is kept, and refused
  if [ -f "$2" ]; then
    plain "$1" >/dev/null || die "$1 cannot be read as UTF-8 text"
    plain "$1" | cmp -s - "$2" || die "${text%/text} was prepared with another $1; choose another --out or remove it"
  else
    make "$2" plain "$1" || die "$1 cannot be read as UTF-8 text"
  fi
}
take() { # take SPLIT NAME...: $text/SPLIT out of the folder --from
  local split=$1 source
  shift
  source=$(local_copy "$from" "$@") || { [ -f "$text/$split" ]; return; }
  copy "$source" "$text/$split"
  [ -s "$text/$split" ] || { rm "$text/$split"; die "$source is empty"; }
}
