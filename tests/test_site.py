"""The documentation as a site: Sphinx warns about nothing, every page is there, links work."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers import REPOSITORY

from docs.build import site


@pytest.mark.sphinx
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    # Each page would list all functions in its side bar, and then drop them: half of the time.
    assert site.build(tmp_path, toc_object_entries=False) == 0
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    written = [
        path.relative_to(REPOSITORY / "docs").with_suffix(".html")
        for path in (REPOSITORY / "docs").rglob("*.md")
    ]
    assert len(written) > 50
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
        "[a](../map.md#files) [mpipar/cli.py](../../mpipar/cli.py) ![b](../report.png)\n"
        "[README](../../README.md#run-it) [c](https://mpi-forum.org) `[d](../../setup.cfg)`\n"
        "```\n[e](../../setup.cfg)\n```\n"
    )
    assert site.without_outside_links(Path("docs/tour/page.md"), page) == page.replace(
        "[mpipar/cli.py](../../mpipar/cli.py)", "`mpipar/cli.py`"
    ).replace("[README](../../README.md#run-it)", "`README.md`")
