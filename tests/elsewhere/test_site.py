"""The documentation as a site: Sphinx warns about nothing, every page is there, links work."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers import REPOSITORY

from docs.build import site

# What no extra of the documentation installs, and an MPI library.
HIDDEN = "cupy matplotlib mpi4py.MPI numba scipy sklearn tensorboard tokenizers torch transformers"
BUILD_WITHOUT = """
import sys
from pathlib import Path

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in sys.argv[2].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
from docs.build import site
# Each page would list all functions in its side bar, and then drop them: half of the time.
sys.exit(site.build(Path(sys.argv[1]), toc_object_entries=False))
"""


@pytest.mark.sphinx
def test_the_site_is_built_from_its_extra_without_warnings_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-c", BUILD_WITHOUT, tmp_path, HIDDEN]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    written = [
        path.relative_to(REPOSITORY / "docs").with_suffix(".html")
        for path in (REPOSITORY / "docs").rglob("*.md")
    ]
    assert len(written) > 20
    assert set(written) <= pages.keys()
    assert "all_reduce" in (tmp_path / "api/mpipar.comm.html").read_text()
    index = next(text for path, text in pages.items() if str(path) == "index.html")
    assert all(f'href="{path}"' in index for path in written if str(path) != "index.html")
    for path, text in pages.items():
        assert 'href="#../' not in text, path
        for link in re.findall(r'href="([^"#:?]+)["#?]', text):
            assert (tmp_path / path.parent / unquote(link)).exists(), (path, link)


def test_docstrings_are_read_as_they_stand():
    assert site.as_rst(["Cut `x` *here*, as_is_.", "", "    a = b | c", "", "`open"]) == [
        r"Cut \ ``x``\  \*here\*, as\_is\_.",
        "",
        "::",
        "",
        "        a = b | c",
        "",
        r"\`open",
        "",
    ]


def test_links_out_of_the_pages_become_code():
    page = (
        "[a](../runs.md#formats) [mpipar/cli.py](../../mpipar/cli.py) ![b](../report.png)\n"
        "[README](../../README.md#run-it) [c](https://mpi-forum.org) `[d](../../setup.cfg)`\n"
        "```\n[e](../../setup.cfg)\n```\n"
    )
    assert site.without_outside_links(Path("docs/tour/page.md"), page) == page.replace(
        "[mpipar/cli.py](../../mpipar/cli.py)", "`mpipar/cli.py`"
    ).replace("[README](../../README.md#run-it)", "`README.md`")
