"""A fairseq plugin that breaks the softmax bottleneck efficiently; importing it registers everything."""

from mixtape_plugin import fairseq_compat

fairseq_compat.apply()

from mixtape_plugin import criterions, models, optim, tasks  # noqa: E402, F401
