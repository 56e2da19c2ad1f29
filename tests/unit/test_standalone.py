"""The layers without fairseq, and how fairseq gets to know the plugin: nothing before it is asked for, all after."""

import os
import subprocess
import sys

import pytest

import mixtape_plugin

USER_DIR = os.path.dirname(mixtape_plugin.__file__)

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
"""
LAYERS = """
import sys, warnings
import torch
def interpreter():
    return sys.excepthook, list(sys.meta_path), list(sys.path), list(warnings.filters), torch.get_default_dtype()
before = interpreter()
import mixtape_plugin.output_layers, mixtape_plugin.modules.locked_dropout
import mixtape_plugin.kernels.mixtape, mixtape_plugin.kernels.mixture_of_softmaxes, mixtape_plugin.kernels.softmax
assert interpreter() == before
"""
USE = """
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer
for name in OUTPUT_LAYERS:
    layer = build_output_layer(OutputLayerConfig(output_layer=name), feature_dim=6, vocab_size=11)
    loss, nll = layer.loss(torch.randn(2, 3, 6), torch.randint(11, (2, 3)), label_smoothing=0.1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in layer.parameters()), name
"""
NO_FAIRSEQ = "assert not [name for name in sys.modules if name.split('.')[0] in ('fairseq', 'hydra', 'omegaconf')]"
FAIRSEQ = """
import logging
logging.basicConfig(level=logging.WARNING)
from fairseq import models, tasks, criterions, optim, utils
from fairseq.data import data_utils
batch_by_size = data_utils.batch_by_size
"""
NOTHING = """
assert interpreter()[:4] == before[:4]
assert "mixtape_transformer" not in models.MODEL_REGISTRY and "bptt_language_modeling" not in tasks.TASK_REGISTRY
assert data_utils.batch_by_size is batch_by_size and "mixtape_plugin.fairseq_compat" not in sys.modules
"""
ASK = f"""
from argparse import Namespace
utils.import_user_module(Namespace(user_dir={USER_DIR!r}))
"""
ALL = """
assert {"mixtape_transformer", "awd_lstm_lm"} <= models.MODEL_REGISTRY.keys()
assert "mixtape_transformer_tiny" in models.ARCH_MODEL_REGISTRY
assert "bptt_language_modeling" in tasks.TASK_REGISTRY and "nt_asgd" in optim.OPTIMIZER_REGISTRY
assert {"output_layer_cross_entropy", "awd_lstm_cross_entropy"} <= criterions.CRITERION_REGISTRY.keys()
assert sys.modules["mixtape_plugin.fairseq_compat"].apply.done
"""
NO_HOOK = "assert sys.excepthook is sys.__excepthook__"


def run(*parts):
    """Lines of Python in a process of their own."""
    code = "\n".join(parts)
    command = [sys.executable, "-c", code]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=os.path.dirname(USER_DIR), env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layers_work_where_fairseq_is_not_installed():
    run(BLOCK, LAYERS, USE, NO_HOOK, NO_FAIRSEQ)
    with pytest.raises(AssertionError, match="ImportError: fairseq"):
        run(BLOCK, "import mixtape_plugin", "mixtape_plugin.register()")


def test_layers_leave_an_installed_fairseq_alone():
    run(LAYERS, USE, NO_HOOK, NO_FAIRSEQ)


def test_layers_first_then_a_user_dir():
    run(LAYERS, FAIRSEQ, "before = interpreter()", NOTHING, ASK, ALL, NO_HOOK)


def test_fairseq_first_then_layers_then_a_user_dir():
    run(FAIRSEQ, LAYERS, NOTHING, ASK, ALL, NO_HOOK)


def test_a_user_dir_alone_under_a_command_prints_user_errors():
    hook = "assert sys.excepthook is mixtape_plugin.errors._excepthook"
    run(FAIRSEQ, "import sys, fairseq_cli.train", ASK, ALL, "import mixtape_plugin.errors", hook)


def test_whoever_imports_a_part_of_the_plugin_gets_it_whole():
    each = """
import importlib, os
for part in ("criterions", "models", "optim", "tasks"):
    if os.fork() == 0:
        importlib.import_module(f"mixtape_plugin.{part}")
        break
else:
    sys.exit(any(os.wait()[1] for _ in range(4)))
"""
    run("import sys", FAIRSEQ, each, ALL, NO_HOOK, "import mixtape_plugin", "mixtape_plugin.register()", ALL)
