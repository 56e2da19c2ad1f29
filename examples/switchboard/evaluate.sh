#!/usr/bin/env bash
# Perplexity, and precision and recall of BLEU-1 to 4, of a training's best checkpoint: beam 10, 5 replies to each context.
set -euo pipefail

usage="usage: evaluate.sh DIR [--data DIR] [--cpu]
  DIR           the training's folder; valid- and test-perplexity.txt, replies.txt, score.txt and score.json appear in it
  --data DIR    what prepare.sh wrote (default: data-bin/switchboard)
  --cpu         use the CPU where there is a GPU, too"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/evaluation.sh"

evaluate_options data-bin/switchboard "$@"
no_more "${extra[@]+"${extra[@]}"}"
[ -f "$save/checkpoint_best.pt" ] || die "$save holds no checkpoint_best.pt"
[ -f "$data/text/test.response" ] || die "--data $data holds no text/test.response; run prepare.sh first"

for split in valid test; do
  validation checkpoint_best.pt $split "validate.$split.log" --batch-size 64 ${cpu:+--cpu}
  if [ $split = valid ]; then # what is of the checkpoint before, perhaps
    rm -f "$save"/{test-perplexity.txt,replies.txt,score.txt,score.json}
    drop_older "${analyses[@]}"
  fi
  show "$split-perplexity.txt"
done

log=$save/generate.log
fairseq-generate "$data" --user-dir "$root/mixtape_plugin" --path "$save/checkpoint_best.pt" --task translation --gen-subset test \
  --batch-size 64 --beam 10 --nbest 5 --max-len-a 0 --max-len-b 30 --lenpen 0 --log-format simple ${cpu:+--cpu} >"$log" 2>&1 ||
  die "fairseq-generate failed: $(tail -n 1 "$log")"

references=$data/text/test.references # several for each context, where prepare.sh had them
[ -f "$references" ] || references=$data/text/test.response
python "$root/scripts/score_dialog.py" --generated "$log" --references "$references" --replies "$save/replies.txt" \
  --json "$save/score.json" >"$save/score.txt.part"
show score.txt
