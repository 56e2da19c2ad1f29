# What prepare.sh of examples/{ptb,wikitext2,one_billion_word,text8} share; they source it, with $root set.

source "$root/examples/lib/recipes.sh"

# ------------------------------------------------------------------------------------------------------ prepare.sh

zip_test() { # zip_test ZIP: whether it is whole
  python -c 'import sys, zipfile; sys.exit(zipfile.ZipFile(sys.argv[1]).testzip() is not None)' "$1" 2>/dev/null
}
zip_member() { # zip_member ZIP NAME: the content of the one file of that name, in whichever folder
  python -c 'import shutil, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in archive.namelist() if name.split("/")[-1] == sys.argv[2]]
shutil.copyfileobj(archive.open(name), sys.stdout.buffer)' "$1" "$2" 2>/dev/null
}
binarize_text() { # binarize_text FOLDER FLAG...: with the dictionary $dict
  binarize "$1" dict.txt --only-source --srcdict "$dict" "${@:2}"
}
dictionary() { # dictionary FLAGS...: $dict, that of --dict or one of the texts given, most frequent words first
  if [ -n "$dict" ]; then
    copy "$dict" "$text/given-dict.txt"
    dict=$text/given-dict.txt
    return
  fi
  dict=$text/dict.txt
  [ -f "$dict" ] || python "$root/examples/lib/make_dictionary.py" "$@" --output "$dict"
}
tokens() { # tokens FOLDER SPLIT: as fairseq-preprocess counted them, with </s>
  sed -n "s|^\[None\] .*/$2: [0-9]* sents, \([0-9]*\) tokens.*|\1|p" "$1/preprocess.log" | tail -n 1
}
unknown() { # unknown FOLDER SPLIT: percent of the tokens, with </s>, that became <unk> for want of a place in the dictionary
  sed -n "s|^\[None\] .*/$2: .* tokens, \([0-9.e-]*\)% replaced.*|\1|p" "$1/preprocess.log" | tail -n 1
}

summary() { # summary OUT TYPES TRAIN VALID TEST: what was made, and whether it is what the papers have
  local folder=$1 types found expected split share
  shift
  types=$(($(lines "$folder/dict.txt") + 2)) # and <unk> and </s>; <s> and <pad> are never predicted
  found="$types types" expected="$1 types"
  shift
  for split in train valid test; do
    if [ -f "$folder/$split.bin" ]; then
      found+=", $split $(tokens "$folder" "$split")" expected+=", $split $1" share=$(unknown "$folder" "$split")
      [ "$share" = 0.0 ] || echo "prepare.sh: $share% of the tokens of $split are not in the dictionary, and <unk> in the data" >&2
    fi
    shift
  done
  [ "$found" = "$expected" ] || [ "$dict" != "$text/dict.txt" ] || # the types of another text's dictionary say nothing
    echo "prepare.sh: not the papers' text, which has (tokens with </s>) $expected" >&2
  echo "prepare.sh: $folder is ready: dictionary of $((types + 2)) entries, of which <s> and <pad> do not count; tokens with </s>: $found"
}
