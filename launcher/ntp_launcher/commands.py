"""Where every command begins and ends: Ctrl-C is no traceback while Python loads what the command needs, nor
when it has returned and Python ends. In between it is the command's own affair.

This module imports nothing that takes time.
"""

import signal
from collections.abc import Callable, Sequence
from importlib import import_module


def _command(module: str) -> Callable[..., int]:
    """Runs `main` of a module of this package."""

    def run(argv: Sequence[str] | None = None) -> int:
        before = signal.getsignal(signal.SIGINT)
        # Ignored is what `nohup` and a shell's `&` want.
        silent = signal.SIG_IGN if before is signal.SIG_IGN else signal.SIG_DFL
        signal.signal(signal.SIGINT, silent)
        main = import_module(module, __package__).main
        signal.signal(signal.SIGINT, before)
        try:
            return main(argv)
        finally:
            signal.signal(signal.SIGINT, silent)

    return run


launch = _command(".cli")
export = _command(".export_cli")
compare = _command(".compare_cli")
plan = _command(".plan_cli")
report = _command(".report_cli")
doctor = _command(".doctor_cli")
heal = _command(".heal_cli")
store = _command(".store_cli")
completion = _command(".completion_cli")
