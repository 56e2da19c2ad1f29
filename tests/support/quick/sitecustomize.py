"""On the PYTHONPATH of what a test without the marker slow starts: such a test trains nothing."""

import sys

if sys.argv and sys.argv[0].endswith("fairseq-train"):
    sys.exit("a test that is not marked slow runs fairseq-train")
