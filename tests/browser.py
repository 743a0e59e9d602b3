"""A headless Chromium for the tests that look at pages; installed with apt-get where it is missing and may be."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
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


@functools.cache
def programs() -> tuple[str, str]:
    """(chromium, chromedriver); skips the test with the reason where they cannot be had."""
    found = _find()
    if found is None:
        reason = _install()
        found = _find()
        if found is None:
            pytest.skip(f"no headless Chromium: {reason}")
    return found


def _find() -> tuple[str, str] | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def _install() -> str:
    """Install Debian's packages; returns why it did not work."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "chromium and chromedriver are not installed, and only root can apt-get install them"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(["apt-get", "update", "-qq"], env=env, capture_output=True, timeout=120)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "chromium-driver"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired:
        return "apt-get install chromium chromium-driver took too long"
    return f"apt-get install chromium chromium-driver failed: {done.stderr.strip()[-300:]}"


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
