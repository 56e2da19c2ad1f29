#!/usr/bin/env bash
# Test perplexity, BLEU and chrF of a training on newstest2014: the average of its last checkpoints, beam 4, length penalty .6.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [--last N] [--references FILE] [--test-set NAME] [--max-tokens N] [--cpu]
  DIR                the training's folder; average.pt, test.hyp, test-perplexity.txt, score.txt and score.json appear in it
  --data DIR         what prepare.sh wrote (default: data-bin/wmt14_en_fr)
  --last N           how many checkpoints to average (default: 10)
  --references FILE  detokenized references (default: text/raw.test.fr of the data)
  --test-set NAME    instead, the references of sacrebleu's test set, wmt14/full, which it downloads
  --max-tokens N     tokens of a batch (default: 4096)
  --cpu              use the CPU where there is a GPU, too"
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/scripts/training.sh"

evaluate_options data-bin/wmt14_en_fr "$@"
no_more "${extra[@]+"${extra[@]}"}"
find_references fr
flags=(--max-tokens "${max_tokens:-4096}" ${cpu:+--cpu})

python "$root/scripts/average_checkpoints.py" --last "${last:-10}" "$save" --by updates --output "$save/average.pt"
test_perplexity "${flags[@]}"
translate fr "${flags[@]}"
scores fr
