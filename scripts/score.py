#!/usr/bin/env python3
"""Score a translation by every BLEU that papers quote, and by chrF, each with sacrebleu's signature.

    python scripts/score.py --hypotheses hyp.de --references ref.de --source-lang en --target-lang de
    python scripts/score.py --hypotheses hyp.de --test-set wmt14/full --source-lang en --target-lang de

Both files are detokenized text, one sentence a line. The variants of BLEU differ by up to 2 for one translation:
    13a, intl, 13a lower-cased    sacrebleu's own tokenizers, on the text as it is
    zh                            sacrebleu's own for Chinese, where the others take a sentence for a word
    tokenized                     after Moses punctuation normalization and tokenization (WMT papers before sacrebleu)
    tokenized, compounds split    the same with a-b written as a ##AT##-##AT## b (En-De since Vaswani et al. 2017)
    lower-cased tokens            Moses normalization and tokenization in lower case, against references that have
                                  it already (--lower-cased-tokens; what papers on Multi30k quote)
The two before the last treat hypotheses and references alike, as fairseq's WMT recipes do, which normalize the test set
with the rest; tensor2tensor's script normalizes the hypotheses alone.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Sequence

import sacremoses
import start
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.utils import get_reference_files
from sacremoses.corpus import NonbreakingPrefixes

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import check_outputs, read_lines, write_outputs, write_text


def sentences(path: str) -> list[str]:
    return [line.rstrip("\r\n") for line in read_lines(path)]


def moses_language(lang: str) -> tuple[str, str]:
    """What Moses calls a language (`de` of de, de_DE and de-AT), and how to name its rules: it takes English's
    abbreviations for a language that it does not know."""
    code = re.split("[-_]", lang.lower())[0]
    return code, code if code in NonbreakingPrefixes().available_langs else f"{code}, with abbreviations of en"


def moses_tokenize(lines: list[str], lang: str) -> list[str]:
    """Moses tokens of each line, punctuation normalized first (typographic quotes to ASCII, and such)."""
    lang, _ = moses_language(lang)
    normalizer, tokenizer = sacremoses.MosesPunctNormalizer(lang), sacremoses.MosesTokenizer(lang)
    # With the line's end, which a rule for quotes goes by.
    return [tokenizer.tokenize(normalizer.normalize(line + "\n"), return_str=True) for line in lines]


def split_compounds(lines: list[str]) -> list[str]:
    """Write each hyphen inside a token as a token of its own, `a-b` as `a ##AT##-##AT## b`."""
    return [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in lines]


def score(
    hypotheses: list[str],
    reference_sets: list[list[str]],
    target_lang: str,
    test_set: str | None = None,
    source_lang: str | None = None,
    lower_cased_tokens: list[str] | None = None,
) -> list[dict]:
    """All scores of a corpus.

    Args:
        hypotheses: N detokenized sentences.
        reference_sets: one or more lists of N detokenized sentences.
        target_lang: language of both, with or without its country; German adds BLEU with compounds split, Chinese
            that of sacrebleu's own tokenizer.
        test_set, source_lang: where the references are one of sacrebleu's test sets, for the signatures.
        lower_cased_tokens: N references that are normalized, tokenized and lower-cased already.

    Returns:
        a list of dicts: `metric`, `score` (0 to 100), `signature`, `preprocessing` (before sacrebleu's, or None).

    Raises:
        UserError: hypotheses and references differ in number.
    """
    for references in [*reference_sets, *([lower_cased_tokens] if lower_cased_tokens else [])]:
        if len(hypotheses) != len(references):
            raise UserError(f"there are {len(hypotheses)} hypotheses and {len(references)} references")
    results = []

    def add(name, metric, preprocessing=None, prepare=lambda lines: lines, prepared=None):
        references = prepared or [prepare(references) for references in reference_sets]
        value = metric.corpus_score(prepare(hypotheses), references).score
        signature = metric.get_signature()
        if test_set:
            signature.update("test", test_set)
            signature.update("lang", f"{source_lang}-{target_lang}")
        results.append(
            {"metric": name, "score": value, "signature": str(signature), "preprocessing": preprocessing},
        )

    add("BLEU 13a", BLEU(tokenize="13a"))
    add("BLEU intl", BLEU(tokenize="intl"))
    add("BLEU 13a lower-cased", BLEU(tokenize="13a", lowercase=True))
    language, rules = moses_language(target_lang)
    if language == "zh":
        add("BLEU zh", BLEU(tokenize="zh"))  # sacrebleu's own for it: the others take a sentence for a word
    moses = f"sacremoses {sacremoses.__version__} ({rules}) normalization with line ends and tokenization"
    # force: sacrebleu would warn of tokenized input, which is what this variant is
    add("BLEU tokenized", BLEU(tokenize="none", force=True), moses, lambda lines: moses_tokenize(lines, target_lang))
    if language == "de":
        add(
            "BLEU tokenized, compounds split",
            BLEU(tokenize="none", force=True),
            f"{moses}, a-b as a ##AT##-##AT## b",
            lambda lines: split_compounds(moses_tokenize(lines, target_lang)),
        )
    if lower_cased_tokens:
        add(
            "BLEU lower-cased tokens",
            BLEU(tokenize="none", force=True),
            f"lower-casing, {moses} of the hypotheses",  # in this order: abbreviations are known by their case
            lambda lines: [line.lower() for line in moses_tokenize([line.lower() for line in lines], target_lang)],
            [lower_cased_tokens],
        )
    add("chrF", CHRF())
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hypotheses", required=True, metavar="FILE", help="translations, detokenized")
    references = parser.add_mutually_exclusive_group(required=True)
    references.add_argument("--references", metavar="FILE", help="references, detokenized")
    references.add_argument("--test-set", metavar="NAME", help="references of sacrebleu's test set, such as wmt14/full")
    parser.add_argument(
        "--lower-cased-tokens", metavar="FILE", help="references that are normalized, tokenized and lower-cased already"
    )
    parser.add_argument("--source-lang", required=True, metavar="LANG")
    parser.add_argument("--target-lang", required=True, metavar="LANG")
    parser.add_argument("--json", metavar="FILE", help="also write the scores here")
    args = parser.parse_args(argv)
    check_outputs({"--json": args.json}, [args.hypotheses, args.references, args.lower_cased_tokens])

    reference_files = [args.references]
    if args.test_set is not None:
        try:
            reference_files = get_reference_files(args.test_set, f"{args.source_lang}-{args.target_lang}")
        except Exception as error:  # sacrebleu raises bare Exceptions
            raise UserError(f"--test-set {args.test_set} is not to be had: {error}") from None
    results = score(
        sentences(args.hypotheses),
        [sentences(path) for path in reference_files],
        args.target_lang,
        args.test_set,
        args.source_lang,
        sentences(args.lower_cased_tokens) if args.lower_cased_tokens is not None else None,
    )

    for row in results:
        before = f"  after {row['preprocessing']}" if row["preprocessing"] else ""
        print(f"{row['metric']:<32}{row['score']:6.2f}  {row['signature']}{before}")
    write_outputs(("--json", args.json, lambda path: write_text(path, json.dumps(results, indent=2) + "\n")))


if __name__ == "__main__":
    start.run(main)
