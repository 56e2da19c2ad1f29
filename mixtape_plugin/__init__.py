"""A fairseq plugin that breaks the softmax bottleneck efficiently.

Importing this package, or ``output_layers``, ``kernels`` and ``modules.locked_dropout`` of it, needs torch alone and
changes nothing in the interpreter. :func:`register` makes a plugin of it. Who calls that:

- ``fairseq-train --user-dir mixtape_plugin``, whatever was imported before;
- ``import mixtape_plugin.models``, or ``criterions``, ``optim``, ``tasks``: what fairseq gets to know, it gets to know
  whole;
- your own code, where it loads a checkpoint or builds a model through fairseq.
"""

import sys

from mixtape_plugin.errors import print_user_errors


def register() -> None:
    """Repairs the installed fairseq and registers models, tasks, criterions and the optimizer with it; once is enough.

    Under fairseq's own commands it also has a user's mistake printed in a sentence, by ``sys.excepthook``.

    Raises:
        ImportError: fairseq is not installed.
    """
    if getattr(register, "done", False):
        return
    from mixtape_plugin import fairseq_compat

    fairseq_compat.apply()
    register.done = True  # from here on: the packages below call it, too
    if "fairseq_cli" in sys.modules:
        print_user_errors()
    from mixtape_plugin import criterions, models, optim, tasks  # noqa: F401


class _Folders(list):
    """The folders that this package's modules are in.

    fairseq imports the ``models/`` and ``tasks/`` of a --user-dir, and with them comes :func:`register`. Where the
    package was imported before, it only asks whether the --user-dir is one of these folders: that is the moment.
    """

    def __contains__(self, folder) -> bool:
        found = super().__contains__(folder)
        if found:
            register()
        return found


__path__ = _Folders(__path__)
