#!/usr/bin/env bash
# Perplexity of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/one_billion_word)"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

evaluate_options data-bin/one_billion_word "$@"
check_trained "$data/shard00"
data=$data/shard00 # which has valid and test

perplexity valid 10 token --tokens-per-sample 35 "${extra[@]+"${extra[@]}"}"
perplexity test 1 token --tokens-per-sample 35 "${extra[@]+"${extra[@]}"}"
