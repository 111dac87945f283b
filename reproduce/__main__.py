"""`python -m reproduce`: how the pipeline starts its stages, with the sources of the folder they run in."""

import sys


def start() -> int:
    """The command line and its exit code; Ctrl-C while its modules are still loading ends it as later does."""
    try:
        from reproduce.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("reproduce: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(start())
