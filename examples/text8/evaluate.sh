#!/usr/bin/env bash
# Bits per character of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/text8)"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

evaluate_options data-bin/text8 "$@"
check_trained "$data"

# The hidden state is carried along, so that the length of a segment changes the speed and no result.
perplexity valid 10 character --remove-eos --tokens-per-sample 1000 "${extra[@]+"${extra[@]}"}"
perplexity test 1 character --remove-eos --tokens-per-sample 1000 "${extra[@]+"${extra[@]}"}"
