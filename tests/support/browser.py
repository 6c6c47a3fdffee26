"""A real Chromium for page tests; install it with `scripts/install-chromium`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the installed browser. Without one, tests are skipped, or fail in CI."""
    result = next((path for name in NAMES if (path := shutil.which(name))), None)
    if result is None:
        missing = "Chromium is not installed; run scripts/install-chromium"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=result, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
