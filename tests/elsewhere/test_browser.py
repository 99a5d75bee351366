"""The browser that tests drive: its driver is restarted if its port was taken."""

import browser
import pytest

DRIVER = """#!/bin/sh
echo >> {folder}/starts
if [ $(wc -l < {folder}/starts) -le {taken} ]; then
    echo "Only local connections are allowed."
    exit 1
fi
echo "ChromeDriver was started successfully on port 4321."
exec sleep 60
"""


def start(tmp_path, monkeypatch, taken):
    """Start a driver that finds its port taken so many times."""
    script = tmp_path / "chromedriver"
    script.write_text(DRIVER.format(folder=tmp_path, taken=taken))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return browser.start_driver()


def test_a_port_that_is_taken_costs_one_more_start(tmp_path, monkeypatch):
    driver, port = start(tmp_path, monkeypatch, taken=2)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert port == 4321
    assert len((tmp_path / "starts").read_text()) == 3


def test_a_driver_that_never_starts_is_said(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match="did not start in 5 tries"):
        start(tmp_path, monkeypatch, taken=browser.STARTS)
