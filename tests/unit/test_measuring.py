"""What the benchmarks measure with: the memory that is free, and the search for the largest batch of a budget."""

import io

import pytest
import torch

from mixtape_plugin.benchmarks import measuring
from mixtape_plugin.benchmarks.measuring import available_memory, largest_batch


def search(bytes_of, budget, start=64, least=17, most=10**6):
    """What largest_batch finds, after checks of what it promises; and the batches that it measured."""
    seen = []

    def peak(batch):
        assert least <= batch <= most and batch not in seen
        seen.append(batch)
        size = bytes_of(batch)
        if size > 2 * budget:
            raise MemoryError
        return size

    found, size = largest_batch(peak, budget, start, least, most)
    assert found in seen or found == 0
    if found:
        assert size == bytes_of(found) <= budget
    if found < most:
        assert any(bytes_of(batch) > budget for batch in seen if batch <= max(1.02 * found, found + 1, least))
    return found, seen


@pytest.mark.parametrize("budget", [10**6, 10**7 + 3, 10**8, 10**9])
@pytest.mark.parametrize("a_token", [997, 20_000, 33_333])
def test_search_for_the_largest_batch_is_short_where_memory_is_affine(budget, a_token):
    found, seen = search(lambda batch: 123_456 + a_token * batch, budget)
    exact = (budget - 123_456) // a_token
    assert 0.98 * exact - 1 <= found <= exact
    assert len(seen) <= 9


def test_search_for_the_largest_batch_in_other_curves():
    assert search(lambda batch: 5 * 10**6, 10**6)[0] == 0  # nothing fits
    assert search(lambda batch: 5 * 10**6, 10**7, most=5000)[0] == 5000  # all fit
    assert search(lambda batch: 10**5 * batch, 10**7, start=5000)[0] in (98, 99, 100)  # the first is too large
    assert 0.97 * 10**5 <= search(lambda batch: batch**2, 10**10)[0] <= 10**5
    staircase = search(lambda batch: 10**6 * (1 + batch // 1000), 10**7)[0]  # a chunk more at each step
    assert 9999 * 0.98 <= staircase <= 9999
    saturated = search(lambda batch: min(10**5 * batch, 9 * 10**6) + batch, 10**7, most=10**5)[0]
    assert saturated == 10**5
    assert search(lambda batch: batch, 3, start=1, least=1, most=8)[0] == 3


@pytest.mark.parametrize("fits", [True, False])
def test_search_that_comes_close_to_the_most_measures_it(fits):
    # 200, 800, and the line through them ends at 995, within 2% of 1000
    found, seen = search(lambda batch: batch if fits and batch > 990 else 1.005 * batch, 1000, start=200, most=1000)
    assert 1000 in seen and (found == 1000 if fits else 980 <= found < 1000)


def test_memory_that_torch_keeps_for_reuse_is_free(monkeypatch):
    # of 100 GB another program has 30; torch took 50, which an earlier shape's layers filled, and tensors have 1
    for name, number in (("mem_get_info", (20e9, 100e9)), ("memory_reserved", 50e9), ("memory_allocated", 1e9)):
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    assert available_memory("cuda") == 69e9


@pytest.mark.parametrize("limit, free", [("8000000", 8_000_000 - (7_000_000 - 500_000)), ("max", None), ("1000", 0)])
def test_what_a_container_has_used_of_its_memory_is_not_free(limit, free, tmp_path, monkeypatch):
    """Files that it would give up are."""
    for name, text in {"max": limit, "current": "7000000", "stat": "anon 6\ninactive_file 500000\nslab 1"}.items():
        (tmp_path / name).write_text(text + "\n")
    paths = [tuple(str(tmp_path / name) for name in ("max", "current", "stat"))]
    monkeypatch.setattr(measuring, "CGROUPS", paths)
    of_the_machine = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal")) * 1024
    found = available_memory("cpu")
    assert found == free if free is not None else 10**8 < found <= of_the_machine


def test_memory_that_is_free(monkeypatch):
    text = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 5 kB\n"
    monkeypatch.setattr(measuring, "open", lambda path: io.StringIO(text), raising=False)
    monkeypatch.setattr(measuring, "CGROUPS", ())
    assert available_memory("cpu") == 5 * 1024
