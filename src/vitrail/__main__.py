"""The command `vitrail`, also as `python -m vitrail`."""

import sys

from vitrail.cli.app import app
from vitrail.errors import VitrailError


def main() -> None:
    """Run the command line. What a user caused is one sentence on stderr and exit code 2."""
    try:
        app()
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `vitrail models | head`: the reader left, which is no fault
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
