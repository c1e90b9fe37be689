"""`outrider`, and `python -m outrider`."""

import sys


def run() -> None:
    """The command line. An interrupt while it is still imported ends it as quietly as one that comes later."""
    try:
        from outrider.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
