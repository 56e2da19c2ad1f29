#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training: the average of its last 5 epochs, beam 4, length penalty .6.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR]
  DIR           the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/multi30k.en-de)"
die() { echo "evaluate.sh: $*" >&2; exit 1; }

case ${1-} in -h | --help) echo "$usage"; exit ;; "" | -*) die "the training's folder is missing; see evaluate.sh --help" ;; esac
save=$1 data=data-bin/multi30k.en-de
shift
while [ $# -gt 0 ]; do
  case $1 in
    --data) [ $# -gt 1 ] || die "--data needs a value"; data=$2; shift 2 ;;
    *) die "unknown option $1; see evaluate.sh --help" ;;
  esac
done
[ -d "$save" ] || die "$save is no folder"
reference=$(compgen -G "$data/text/raw.test.*" | grep -v '\.en$') || die "--data $data holds no text/raw.test.*; run prepare.sh first"
target=${reference##*.}

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${MIXTAPE_VENV:-$root/.venv}
[ ! -d "$venv/bin" ] || PATH=$(cd "$venv" && pwd)/bin:$PATH
export PYTHONUTF8=1 # the tools would otherwise follow the locale

python "$root/scripts/average_checkpoints.py" --last 5 "$save" --output "$save/average.pt"
stock=("$data" --user-dir "$root/mixtape_plugin" --path "$save/average.pt")

# nll_loss (bits a subword, </s> included) and ppl = 2^nll_loss are those of the model, without label smoothing.
fairseq-validate "${stock[@]}" --task translation --valid-subset test --max-tokens 4096 --log-format simple >"$save/validate.log" 2>&1 ||
  die "fairseq-validate failed: $(tail -n 1 "$save/validate.log")"
grep -o 'nll_loss [0-9.]* | ppl [0-9.]*' "$save/validate.log" | tail -n 1 | sed 's/^/test /' >"$save/test-perplexity.txt"
cat "$save/test-perplexity.txt"

fairseq-generate "${stock[@]}" --gen-subset test --beam 4 --lenpen 0.6 --remove-bpe --max-tokens 4096 --log-format simple \
  >"$save/generate.log" 2>&1 || die "fairseq-generate failed: $(tail -n 1 "$save/generate.log")"
# fairseq translates sentences of similar length together; H-<line number> restores the order of the test set.
grep '^H-' "$save/generate.log" | sed 's/^H-//' | sort -n | cut -f 3- | sacremoses -q -l "$target" detokenize >"$save/test.hyp.part"
mv "$save/test.hyp.part" "$save/test.hyp"

python "$root/scripts/score.py" --hypotheses "$save/test.hyp" --references "$reference" --source-lang en --target-lang "$target" \
  --json "$save/score.json" >"$save/score.txt.part"
mv "$save/score.txt.part" "$save/score.txt"
cat "$save/score.txt"
