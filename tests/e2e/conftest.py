"""A browser with the dashboard of the example: one for all tests of it, as both start slowly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .browsers import Browser, browsing
from .dashboards import PASSWORD, TOKEN, USERS, Dashboard


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Give the example with an operator and a viewer."""
    folder = tmp_path_factory.mktemp("shop")
    shop = Dashboard(DATABASE_URL="", SHOP_DATA_DIR=str(folder), SHOP_MONITOR_TOKEN=TOKEN)
    shop.run("migrate_all")
    shop.run("shell", "-c", USERS)
    with shop.holding():
        yield shop


@pytest.fixture(scope="package")
def window(shop: Dashboard) -> Iterator[Browser]:
    """Open a browser."""
    with shop.serve() as site, browsing(site.address) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    """Give the browser of an operator."""
    window.log_in("ada", PASSWORD)
    window.complaints()
    return window
