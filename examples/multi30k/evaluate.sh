#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training: the average of its last 5 epochs, beam 4, length penalty .6.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR]
  DIR           the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/multi30k.en-de)"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/training.sh"

evaluate_options data-bin/multi30k.en-de "$@"
no_more "${extra[@]+"${extra[@]}"}"
reference=$(compgen -G "$data/text/raw.test.*" | grep -v '\.en$') || die "--data $data holds no text/raw.test.*; run prepare.sh first"
target=${reference##*.}
find_references "$target"

python "$root/scripts/average_checkpoints.py" --last 5 "$save" --output "$save/average.pt"
test_perplexity --max-tokens 4096
translate "$target" --max-tokens 4096
scores "$target"
