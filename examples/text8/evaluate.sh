#!/usr/bin/env bash
# Bits per character of a training's best checkpoint: validation text in 10 columns, test text in 1.
set -euo pipefail

root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

# The hidden state is carried along, so that the length of a segment changes the speed and no result.
adaptive="" evaluate_language_model text8 character "--remove-eos --tokens-per-sample 1000" "$@"
