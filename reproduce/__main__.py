"""`python -m reproduce`: how the pipeline starts its stages, with the sources of the folder they run in."""

import sys

from reproduce.cli import main

sys.exit(main())
