#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training: the average of its last 10 epochs, beam 5.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [--last N] [--valid] [--tune-lenpen LIST] [--cpu]
  DIR                the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR         what prepare.sh wrote (default: data-bin/multi30k.en-de)
  --last N           how many epochs to average (default: 10)
  --valid            also translate and score the validation text, into valid.hyp, valid-score.txt and valid-score.json
  --tune-lenpen LIST also translate the test text with the penalty of LIST, such as '1 1.5 2', best in
                     validation BLEU; into lenpen, lenpen.json
  --cpu              use the CPU where there is a GPU, too"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

evaluate_options data-bin/multi30k.en-de "$@"
search=(--beam 5)
target=""
for reference in "$data"/text/raw.test.*; do
  [ ! -f "$reference" ] || [ "${reference##*.}" = en ] || target=${reference##*.}
done
[ -n "$target" ] || die "--data $data holds no text/raw.test.*; run prepare.sh first"
evaluate_translation "$target" 10 epochs # average, fairseq-validate, fairseq-generate, score.py
