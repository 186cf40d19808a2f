"""`python -m keepsight` is `keepsight`."""

import sys

from keepsight.cli.main import main

sys.exit(main())
