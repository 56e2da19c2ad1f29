"""Files that pass for checkpoints, whatever is in them."""

import pytest
import torch
from fairseq import checkpoint_utils

from mixtape_plugin.fairseq_compat.checkpoints import loads_weights_only

by_allow_list = pytest.mark.skipif(not loads_weights_only(), reason="torch < 2.6 has no allow-list")


class Pickled:
    """Becomes, in a pickle, a call of `function`."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


def save(content, path, args=None, cfg=None, **kwargs):
    """The least that fairseq takes for a checkpoint, with `content` in it."""
    history = [{"criterion_name": "CrossEntropyCriterion", "num_updates": 1, "lr_scheduler_state": {}}]
    extra_state = {"train_iterator": {"epoch": 1}, "content": content}
    state = {"args": args, "cfg": cfg, "model": {}, "optimizer_history": history, "extra_state": extra_state}
    torch.save(state, path, **kwargs)
    return str(path)


def load(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


def load_content(path):
    return load(path)["extra_state"]["content"]
