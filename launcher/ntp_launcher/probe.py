"""`python -m ntp_launcher.probe`: whether a rank's GPU computes the integers that it must.

It is started in the environment of the rank's worker.
"""

import os
import sys

import torch
from ntp_kernels import selftest

from ntp.config import parse_config
from ntp.device import choose_device


def main() -> int:
    """0 for a device that passes. A broken one raises, or its driver ends the process."""
    device = choose_device(parse_config(os.environ["NTP_CONFIG"]), int(os.environ["LOCAL_RANK"]))
    verdict = selftest.cut_form(device)
    torch.cuda.synchronize(device)
    sys.stdout.write(f"{verdict.form}: {verdict.reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
