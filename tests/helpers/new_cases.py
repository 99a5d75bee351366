"""Find the cases that the tests keep, after a change of choices or of what is legal together.

    PYTHONPATH=. python tests/helpers/new_cases.py        # takes half a minute
    PYTHONPATH=. python tests/helpers/new_cases.py --all  # takes a quarter of an hour or more

The first keeps the cases in drawn.json that are legal, and adds some for new values; the second
finds them anew. Both find the lives in lives/cases.json anew, which is quick.
"""

import sys

import drawn

from tests.helpers.lives import kept

if __name__ == "__main__":
    assert sys.argv[1:] in ([], ["--all"]), __doc__
    drawn.find(anew=sys.argv[1:] == ["--all"])
    kept.find()
