"""A headless Chromium for the tests that look at pages; ``.ci/run`` installs it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Chromium may not reach for the network, and starts from an empty profile.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
).split()


def programs() -> tuple[str, str]:
    """(chromium, chromedriver); skips the test where they are not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("no headless Chromium: install chromium and chromedriver (Debian: chromium, chromium-driver)")
    return browser, driver


@contextmanager
def chromium(width: int = 1500, height: int = 1000) -> Iterator[Any]:
    """A selenium driver of a fresh browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    browser, driver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        made = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield made
        finally:
            made.quit()


def open_page(driver: Any, path: Path) -> None:
    """Load a file; the address is the file's own, so a page that needs a server would fail."""
    driver.get(path.absolute().as_uri())
