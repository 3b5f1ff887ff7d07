"""`python -m ntp_launcher` is `ntp-launch`."""

import sys

from ntp_launcher.commands import launch

sys.exit(launch())
