#!/usr/bin/env bash
# English-French of WMT'14: all of its training data, newstest2012 and 2013 to validate, newstest2014 to test, joint BPE.
# A rerun continues where the last one stopped: every file appears under its name only when it is whole.
set -euo pipefail

usage="usage: prepare.sh [--from DIR] [--out DIR] [--merges N] [--bpe subword-nmt|sentencepiece] [--workers N]
  --from DIR    take the archives of statmt.org from DIR instead of downloading them: training-parallel-europarl-v7.tgz,
                training-parallel-commoncrawl.tgz, training-parallel-un.tgz (all wmt13), training-parallel-nc-v9.tgz (wmt14),
                training-giga-fren.tar (wmt10), dev.tgz and test-full.tgz (both wmt14); or under their paths, as
                DIR/wmt14/dev.tgz
  --out DIR     binarized data, the text in DIR/text (default: data-bin/wmt14_en_fr)
  --merges N    BPE merges (of sentencepiece: subwords), learned on both languages together (default: 32000)
  --bpe TOOL    subword-nmt (default) or sentencepiece
  --workers N   processes (default: as many as there are processor cores); the data is the same with any number of them"
root=$(CDPATH= cd "$(dirname "$0")/../.." && pwd)
source "$root/examples/lib/translation.sh"

target=fr from="" out=data-bin/wmt14_en_fr merges=32000 bpe=subword-nmt workers=$(getconf _NPROCESSORS_ONLN)
translation_options "" "$@"
begin "$out" "from ${from:-$mirrors}, target $target, merges $merges, $bpe"
needs 75 4 900 "and the download of 6.7 GB"

from_archives train \
  "wmt13/training-parallel-europarl-v7.tgz europarl-v7.fr-en.en europarl-v7.fr-en.fr" \
  "wmt13/training-parallel-commoncrawl.tgz commoncrawl.fr-en.en commoncrawl.fr-en.fr" \
  "wmt13/training-parallel-un.tgz undoc.2000.fr-en.en undoc.2000.fr-en.fr" \
  "wmt14/training-parallel-nc-v9.tgz news-commentary-v9.fr-en.en news-commentary-v9.fr-en.fr" \
  "wmt10/training-giga-fren.tar giga-fren.release2.fixed.en.gz giga-fren.release2.fixed.fr.gz"
from_archives valid \
  "wmt14/dev.tgz newstest2012-src.en.sgm newstest2012-ref.fr.sgm" \
  "wmt14/dev.tgz newstest2013-src.en.sgm newstest2013-ref.fr.sgm"
from_archives test "wmt14/test-full.tgz newstest2014-fren-src.en.sgm newstest2014-fren-ref.fr.sgm"
expect 40836715 6003 3003
subwords --clean
