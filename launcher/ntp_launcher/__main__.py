"""`python -m ntp_launcher` is `ntp-launch`."""

import sys

from ntp_launcher.cli import main

sys.exit(main())
