"""fairseq-hydra-train, whose options come from a YAML file."""

import pytest
from conftest import USER_DIR, console_script, start
from fairseq import checkpoint_utils
from toy_text import toy_text  # noqa: F401

CONFIG = """
common: {{user_dir: {user_dir}, cpu: true, log_interval: 1}}
task: {{_name: bptt_language_modeling, data: {data}, tokens_per_sample: 35}}
dataset: {{batch_size: 4, batch_size_valid: 3, num_workers: 0}}
model: {{_name: awd_lstm_lm, embed_dim: 8, hidden_sizes: '12,10', output_layer: mixtape, frequent_ratio: 0.5}}
criterion: {{_name: awd_lstm_cross_entropy}}
optimizer: {{_name: nt_asgd}}
optimization: {{lr: [5], max_update: 3}}
lr_scheduler: {{_name: fixed}}
checkpoint: {{save_dir: {save_dir}}}
"""


def train(folder, *overrides):
    config = ["--config-dir", folder, "--config-name", "lm", f"hydra.run.dir={folder}/hydra"]
    process = start(console_script("hydra-train"), *config, *overrides)
    return process.communicate()[1], process.returncode


@pytest.mark.slow
def test_trains_and_refuses_an_option_that_the_model_has_not(text, tmp_path):
    config = CONFIG.format(user_dir=USER_DIR, data=text, save_dir=tmp_path / "save")
    (tmp_path / "lm.yaml").write_text(config)
    stderr, status = train(tmp_path, "+model.num_component=3")
    assert status == 1
    assert "UserError: model.num_component is no option of awd_lstm_lm: num_components?" in stderr
    assert not list((tmp_path / "save").iterdir())
    stderr, status = train(tmp_path, "+model.num_components=3")
    assert status == 0, stderr
    (model,), args, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "save/checkpoint_last.pt")])
    layer = model.decoder.output_projection.config
    assert (layer.output_layer, layer.num_components, layer.frequent_ratio) == ("mixtape", 3, 0.5)
    assert layer.gate_weight_norm  # as of all language models
