"""A process that ends in the middle of an epoch, while threads read batches ahead, ends well."""

import os
import subprocess
import sys

import pytest

# A batch that is made in torch, as collating is, and for long enough that the process ends meanwhile.
SLOW_BATCHES = """
import sys, torch, mixtape_plugin.tasks
from fairseq.data.iterators import BufferedIterator

class SlowBatches:
    def __len__(self):
        return 1000
    def __iter__(self):
        numbers = torch.randn(1200, 1200)
        while True:
            yield (numbers @ numbers @ numbers)[0, 0].item()

batches = [BufferedIterator(int(size), SlowBatches()) for size in sys.argv[1:]]
for _ in range(2):
    for iterator in batches:
        next(iterator)
{}
"""


@pytest.mark.parametrize("end, status", [("print('trained')", 0), ("sys.exit(3)", 3)], ids=["end", "exit"])
def test_reading_ahead_ends_with_the_process(end, status):
    sizes = ["1", "100"]  # one queue that fills, and one that does not
    command = [sys.executable, "-c", SLOW_BATCHES.format(end), *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == status, result.stderr
    assert "terminate called" not in result.stderr
