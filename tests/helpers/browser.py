"""A headless Chromium, driven by chromedriver over HTTP: only what the page tests need."""

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 60.0  # seconds for one command
STARTS = 5


def missing_programs() -> list[str]:
    """Return the names of the programs that are not installed here."""
    browser = [] if any(map(shutil.which, CHROMIUM)) else ["chromium"]
    return browser + ([] if shutil.which("chromedriver") else ["chromium-driver"])


class Browser:
    """One window. Every call raises RuntimeError with the driver's words when it fails."""

    def __init__(self, address: str, width: int, height: int):
        self.address = address
        binary = next(filter(None, map(shutil.which, CHROMIUM)))
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            f"--window-size={width},{height}",
        ]
        session = self._post(
            "",
            {
                "capabilities": {
                    "alwaysMatch": {
                        "goog:chromeOptions": {"binary": binary, "args": arguments},
                        "goog:loggingPrefs": {"browser": "ALL"},
                        "timeouts": {"script": 30_000},
                    }
                }
            },
        )
        self.address += f"/{session['sessionId']}"

    def _post(self, path: str, value: dict | None = None, method: str = "POST"):
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(  # noqa: S310 (our own driver on this host)
            f"{self.address}{path}", body, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:  # noqa: S310
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def open(self, path: Path) -> None:
        """Load a file."""
        self._post("/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments):
        """Run the body of a function and return its result; wait for it if it is a promise."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def console(self) -> list[dict]:
        """Return the console's messages since the last call."""
        return self._post("/se/log", {"type": "browser"})

    def prefer(self, theme: str) -> None:
        """Set what the system prefers, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self._post(
            "/goog/cdp/execute",
            {
                "cmd": "Emulation.setEmulatedMedia",
                "params": {"features": [feature]},
            },
        )

    def resize(self, width: int, height: int) -> None:
        """Give the window a size in pixels."""
        self._post("/window/rect", {"width": width, "height": height})

    def move(self, x: float, y: float, *, clicks: int = 0) -> None:
        """Move the pointer to a point of the window, and click there so many times."""
        actions = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        for _ in range(clicks):
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._post(
            "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]}
        )

    def click(self, selector: str) -> None:
        """Click the middle of the first element that fits, after bringing it into view."""
        x, y = self.run(
            "const e = document.querySelector(arguments[0]);"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2];",
            selector,
        )
        self.move(x, y, clicks=1)

    def hold(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press the button at a point of the window, and release it at another one."""

        def point(left, top):
            return {"type": "pointerMove", "duration": 0, "x": round(left), "y": round(top)}

        way = [point(x + (to_x - x) * part / 4, y + (to_y - y) * part / 4) for part in range(5)]
        actions = [
            way[0],
            {"type": "pointerDown", "button": 0},
            *way[1:],
            {"type": "pointerUp", "button": 0},
        ]
        self._post(
            "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]}
        )

    def press(self, key: str, *, held: str = "") -> None:
        """Press a key for the element that has the focus, perhaps while another one is held."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        if held:
            actions = [
                {"type": "keyDown", "value": held},
                *actions,
                {"type": "keyUp", "value": held},
            ]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        box = self.run("const d = document.documentElement;return [innerWidth, d.scrollHeight];")
        clip = {"x": 0, "y": 0, "width": box[0], "height": box[1], "scale": 1}
        answer = self._post(
            "/goog/cdp/execute",
            {
                "cmd": "Page.captureScreenshot",
                "params": {"captureBeyondViewport": True, "clip": clip},
            },
        )
        path.write_bytes(base64.b64decode(answer["data"]))


def start_driver() -> tuple[subprocess.Popen, int]:
    """A chromedriver, and the port that it listens on.

    It takes a free port of IPv4 and then the same one of IPv6, which another process may have. Then
    it ends, and is started again.
    """
    for _ in range(STARTS):
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in driver.stdout:
            if "started successfully on port" in line:
                return driver, int(line.rstrip(".\n").rsplit(" ", 1)[1])
        driver.wait()
        driver.stdout.close()
    raise AssertionError(f"chromedriver did not start in {STARTS} tries")


@contextlib.contextmanager
def browser(width: int = 1440, height: int = 1000) -> Iterator[Browser]:
    """A browser for the duration of a `with`; afterwards its processes are gone."""
    driver, port = start_driver()
    try:
        window = Browser(f"http://127.0.0.1:{port}/session", width, height)
        try:
            yield window
        finally:
            window._post("", method="DELETE")
    finally:
        driver.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(5)
        driver.kill()
        driver.wait()
        driver.stdout.close()
