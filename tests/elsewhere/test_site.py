"""The documentation as a site: Sphinx warns about nothing, every page is there, links work."""

import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
from helpers import REPOSITORY

from docs import conf


@pytest.mark.sphinx
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-qW", "-d", tmp_path / "read", "docs", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    written = [path.relative_to(conf.DOCS).with_suffix(".html") for path in conf.DOCS.rglob("*.md")]
    assert len(written) > 20
    assert set(written) <= pages.keys()
    index = next(text for path, text in pages.items() if str(path) == "index.html")
    assert all(f'href="{path}"' in index for path in written if str(path) != "index.html")
    for path, text in pages.items():
        assert 'href="#../' not in text, path
        for link in re.findall(r'href="([^"#:?]+)["#?]', text):
            assert (tmp_path / path.parent / unquote(link)).exists(), (path, link)


def test_links_out_of_the_pages_become_code():
    page = (
        "[a](../runs.md#formats) [mpipar/cli.py](../../mpipar/cli.py) ![b](../report.png)\n"
        "[README](../../README.md#run-it) [c](https://mpi-forum.org) `[d](../../setup.cfg)`\n"
        "```\n[e](../../setup.cfg)\n```\n"
    )
    assert conf.plain_links(conf.DOCS / "tour", page) == page.replace(
        "[mpipar/cli.py](../../mpipar/cli.py)", "`mpipar/cli.py`"
    ).replace("[README](../../README.md#run-it)", "`README.md`")
