"""A browser for pages: the system's Chromium, driven by playwright. Skips loudly where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("NOT TESTED: there is no Chromium on this machine; on Debian: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: pip install 'twostroke[e2e]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
