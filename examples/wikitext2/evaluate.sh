#!/usr/bin/env bash
# Perplexity of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

adaptive=yes evaluate_language_model wikitext2 token "--tokens-per-sample 70" "$@"
