"""`python -m ntp_launcher.probe`: whether the GPU of LOCAL_RANK computes the integers that it must."""

import os
import sys

import torch
from ntp_kernels import selftest


def main() -> int:
    """0 for a device that passes. A broken one raises, or its driver ends the process."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    verdict = selftest.cut_form(device)
    torch.cuda.synchronize(device)
    sys.stdout.write(f"{verdict.form}: {verdict.reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
