"""Find the cases that the tests keep, after a change of choices or of what is legal together.

    PYTHONPATH=. python tests/helpers/new_cases.py        # half a minute
    PYTHONPATH=. python tests/helpers/new_cases.py --all  # finds those in drawn.json anew: long

The first keeps the legal cases in drawn.json and adds some for new values. Both find the lives in
lives/cases.json anew.
"""

import sys

import drawn

from tests.helpers.lives import kept

if __name__ == "__main__":
    drawn.find(anew=sys.argv[1:] == ["--all"])
    kept.find()
