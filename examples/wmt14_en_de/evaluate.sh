#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training on newstest2014: the average of its last checkpoints, beam 4, length penalty .6.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

# average, fairseq-validate, fairseq-generate, score.py: evaluate_translation in examples/lib/evaluation.sh
evaluate_wmt data-bin/wmt14_en_de de "$@"
