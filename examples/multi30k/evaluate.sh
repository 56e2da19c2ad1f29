#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training: the average of its last 5 epochs, beam 4, length penalty .6.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR]
  DIR           the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/multi30k.en-de)"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/training.sh"

evaluate_options data-bin/multi30k.en-de "$@"
reference=$(compgen -G "$data/text/raw.test.*" | grep -v '\.en$') || die "--data $data holds no text/raw.test.*; run prepare.sh first"
evaluate_translation "${reference##*.}" 5 epochs # average, fairseq-validate, fairseq-generate, score.py
