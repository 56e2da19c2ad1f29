#!/usr/bin/env bash
# Perplexity of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [--dynamic] [--cache] [flags of fairseq-eval-lm]
  DIR           the training's folder, with checkpoint_best.pt; valid.txt and test.txt appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/wikitext2)
  --dynamic     instead, the test text by dynamic evaluation, scripts/dynamic_evaluation.py, which further flags go to
  --cache       instead, the test text with a cache pointer, scripts/cache_pointer.py, which further flags go to"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

evaluate_options data-bin/wikitext2 "$@"
check_trained "$data"

adapt wikitext2
perplexity valid 10 token --tokens-per-sample 70 "${extra[@]+"${extra[@]}"}"
perplexity test 1 token --tokens-per-sample 70 "${extra[@]+"${extra[@]}"}"
