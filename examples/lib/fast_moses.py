"""The Moses rules of sacremoses, the same output in less time: no rule is tried on a line where it could not match."""

import re

from sacremoses import MosesPunctNormalizer, MosesTokenizer


class Contains:
    """A pattern that is tried only on a text that has some string in it, without which it could not match."""

    def __init__(self, string, pattern):
        self.string, self.pattern = string, pattern

    def sub(self, replacement, text):
        return self.pattern.sub(replacement, text) if self.string in text else text


class Literal:
    """A pattern that is a plain string, replaced without a regular expression."""

    def __init__(self, string):
        self.string = string

    def sub(self, replacement, text):
        return text.replace(self.string, replacement)


class Spaces:
    r"""`\s+` -> one space; the tokenizer strips its text right afterwards, so that those at the ends may go as well."""

    def sub(self, replacement, text):
        return " ".join(text.split())


class Normalizer(MosesPunctNormalizer):
    """sacremoses' punctuation rules, without looking each of them up for each line."""

    def __init__(self, language):
        super().__init__(language)
        self.rules = [(self.fast(*rule), rule[1]) for rule in self.substitutions]

    @staticmethod
    def fast(pattern, replacement):
        unescaped = re.sub(r"\\([()?!])", r"\1", pattern)
        if not re.search(r"[\\\[\]()+*?.^$|]", re.sub(r"\\[()?!]", "", pattern)) and "\\" not in replacement:
            return Literal(unescaped)
        if pattern == " +":
            return Contains("  ", re.compile(pattern))
        # A character that every match has: the last one outside of classes, escapes and quantifiers, if there is one.
        plain = re.findall(r"[^ ]", re.sub(r"\[[^]]*\]|\\.|[()+*?.^$|{}]", "", pattern))
        return Contains(plain[-1], re.compile(pattern)) if plain else re.compile(pattern)

    def normalize(self, text):
        for pattern, replacement in self.rules:
            text = pattern.sub(replacement, text)
        return text.strip()


class Tokenizer(MosesTokenizer):
    """sacremoses' tokenizer, with the same rules: each is tried only where it can match, sets are made once."""

    def __init__(self, language):
        super().__init__(language)
        self.alpha, self.lower = frozenset(self.IsAlpha), frozenset(self.IsLower)
        self.DEDUPLICATE_SPACE = Spaces(), " "
        for name in ("COMMA_SEPARATE_1", "COMMA_SEPARATE_2", "COMMA_SEPARATE_3"):
            setattr(self, name, self.where(",", getattr(self, name)))
        self.NON_SPECIFIC_APOSTROPHE = self.where("'", self.NON_SPECIFIC_APOSTROPHE)
        self.TRAILING_DOT_APOSTROPHE = self.where(".'", self.TRAILING_DOT_APOSTROPHE)
        self.ENGLISH_SPECIFIC_APOSTROPHE = [self.where("'", rule) for rule in self.ENGLISH_SPECIFIC_APOSTROPHE]
        self.FR_IT_SPECIFIC_APOSTROPHE = [self.where("'", rule) for rule in self.FR_IT_SPECIFIC_APOSTROPHE]
        self.MOSES_ESCAPE_XML_REGEXES = [
            (Literal(pattern.pattern.replace("\\", "")), replacement)
            for pattern, replacement in self.MOSES_ESCAPE_XML_REGEXES
        ]

    @staticmethod
    def where(string, rule):
        return Contains(string, rule[0]), rule[1]

    def islower(self, text):
        return self.lower.issuperset(text)

    def isanyalpha(self, text):
        return not self.alpha.isdisjoint(text)

    def handles_nonbreaking_prefixes(self, text):
        # Only a word that ends with a period may change, and what becomes of it hangs on the next word alone.
        words = text.split()
        for i, word in enumerate(words):
            if word.endswith(".") and len(word) > 1:
                split = super().handles_nonbreaking_prefixes(" ".join(words[i : i + 2]))
                if split.startswith(word[:-1] + " ."):
                    words[i] = word[:-1] + " ."
        return " ".join(words)
