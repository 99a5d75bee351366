"""Writes the generated parts of the pages, reports those that are outdated, or measures for them.

    python -m bench.docs [PAGE...]              # write all pages, or these
    python -m bench.docs --check [PAGE...]      # write nothing; exit 1 if a page is out of date
    python -m bench.docs --no-run [PAGE...]     # leave the blocks alone whose commands take time
    python -m bench.docs measure FILE.json ['COMMAND' ...]

The generator is in docs/build/, where each kind of block is explained.
"""

import sys

if __name__ == "__main__":
    from docs.build.__main__ import main

    sys.exit(main())
