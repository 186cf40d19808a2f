"""Run the `keepsight` command as `python -m keepsight`."""

import sys

from keepsight.cli.main import main

sys.exit(main())
