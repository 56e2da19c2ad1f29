#!/usr/bin/env bash
# English-German as the Mixtape paper has it: WMT'16 training data, newstest2013 to validate, newstest2014 to test, joint BPE.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--out DIR] [--merges N] [--bpe subword-nmt|sentencepiece] [--workers N]
  --from DIR    take the archives of statmt.org from DIR instead of downloading them: training-parallel-europarl-v7.tgz,
                training-parallel-commoncrawl.tgz (both wmt13), training-parallel-nc-v11.tgz, dev.tgz (both wmt16) and
                test-full.tgz (wmt14); or under their paths, as DIR/wmt16/translation-task/dev.tgz
  --out DIR     binarized data, the text in DIR/text (default: data-bin/wmt14_en_de)
  --merges N    BPE merges (of sentencepiece: subwords), learned on both languages together (default: 32000)
  --bpe TOOL    subword-nmt (default) or sentencepiece
  --workers N   processes (default: as many as there are processor cores); the data is the same with any number of them"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/translation.sh"

target=de from="" out=data-bin/wmt14_en_de merges=32000 bpe=subword-nmt workers=$(getconf _NPROCESSORS_ONLN)
translation_options "" "$@"
begin "$out" "from ${from:-$mirrors}, target $target, merges $merges, $bpe"
needs 10 3 90 "and the download of 1.8 GB"

from_archives train \
  "wmt13/training-parallel-europarl-v7.tgz europarl-v7.de-en.en europarl-v7.de-en.de" \
  "wmt13/training-parallel-commoncrawl.tgz commoncrawl.de-en.en commoncrawl.de-en.de" \
  "wmt16/translation-task/training-parallel-nc-v11.tgz news-commentary-v11.de-en.en news-commentary-v11.de-en.de"
from_archives valid "wmt16/translation-task/dev.tgz newstest2013-src.en.sgm newstest2013-ref.de.sgm"
from_archives test "wmt14/test-full.tgz newstest2014-deen-src.en.sgm newstest2014-deen-ref.de.sgm"
expect 4548885 3000 3003
subwords --clean
