"""Dropout that a generation may keep on (fairseq's ``--retain-dropout``)."""

from __future__ import annotations

from collections.abc import Sequence


class RetainsDropout:
    """For a module that drops out by a function and not by fairseq's own module: ``drops_out`` says when."""

    training: bool  # torch.nn.Module's
    #: Whether its dropouts go on in evaluation, for samples of what the network is unsure of.
    retains_dropout = False

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: Sequence[str] | None = None, **kwargs
    ) -> None:
        """fairseq's word before a generation: whether dropouts go on there (``--retain-dropout``), and in which
        classes of modules (None: in all)."""
        of_this = retain_dropout_modules is None or type(self).__name__ in retain_dropout_modules
        self.retains_dropout = retain_dropout and of_this

    @property
    def drops_out(self) -> bool:
        return self.training or self.retains_dropout
