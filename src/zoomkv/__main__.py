"""``python -m zoomkv`` is the same as ``zoomkv``."""

import sys

from zoomkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
