"""A real browser without a window, for tests of what pages do."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.poolers import without

# To import it takes every worker half a second, and one of them opens a browser.
if TYPE_CHECKING:
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

PATIENCE = 60
#: What makes a cookie the same one when it is set again.
COOKIE = ("name", "value", "domain", "path", "httpOnly", "sameSite")

_HIDDEN = """
Object.defineProperty(document, 'hidden', {get: () => arguments[0], configurable: true});
document.dispatchEvent(new Event('visibilitychange'));
"""


class Browser:
    """A window of Chromium."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address
        self._sessions: dict[str, dict[str, Any]] = {}

    def open(self, path: str) -> None:
        """Go to a page of the site."""
        self.driver.get(self.address + path)

    def one(self, selector: str) -> WebElement:
        """Give the element, when it is there."""
        return self.until(lambda: self.every(selector))[0]

    def every(self, selector: str) -> list[WebElement]:
        """Give the elements that are there now."""
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str = "body") -> str:
        """Give what a person reads."""
        return self.until(lambda: [each.text for each in self.every(selector)[:1]])[0]

    def ask(self, script: str, *arguments: Any) -> Any:
        """Give what a script returns."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def until(self, condition: Callable[[], T]) -> T:
        """Give what a condition returns, once it is true."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.wait import WebDriverWait

        # A page may go, or a part of it be refreshed, between finding something and looking at it.
        gone = [StaleElementReferenceException]
        return WebDriverWait(self.driver, PATIENCE, 0.2, gone).until(lambda _: condition())

    def settle(self) -> None:
        """Wait until nothing fades, as links of the admin do from one colour to another."""
        self.until(lambda: not self.ask("document.getAnimations().length"))

    def press(self, *keys: str) -> None:
        """Press keys together, by name, or type a text, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        chain = ActionChains(self.driver)
        *held, last = (getattr(Keys, key, key) for key in keys)
        for key in held:
            chain.key_down(key)
        chain.send_keys(last)
        for key in held:
            chain.key_up(key)
        chain.perform()

    def tab(self, *, back: bool = False) -> None:
        """Press the tabulator; with Shift, to go back."""
        self.press(*["SHIFT"] * back, "TAB")

    def status(self) -> int:
        """Give what the server answered when it was asked for this page."""
        found: int = self.ask("performance.getEntriesByType('navigation')[0].responseStatus")
        return found

    def log_in(self, name: str, password: str) -> None:
        """Log in to the admin: at its page, and later by the session that came of it."""
        # The page of the test before would go on to ask for what is new.
        self.driver.get("about:blank")
        self.tell("Network.clearBrowserCookies")
        if name in self._sessions:
            self.tell("Network.setCookie", **self._sessions[name])
            return
        self.open("/admin/login/")
        self.one("[name=username]").send_keys(name)
        self.one("[name=password]").send_keys(password)
        self.one("[type=submit]").click()
        self.until(lambda: self.every("#logout-form"))
        found = self.driver.get_cookie("sessionid") or {}
        self._sessions[name] = {each: found[each] for each in COOKIE}

    def tell(self, command: str, **arguments: Any) -> Any:
        """Send a command of the DevTools."""
        return self.driver.execute_cdp_cmd(command, arguments)

    @contextmanager
    def dark(self) -> Iterator[None]:
        """Prefer dark pages."""
        feature = "prefers-color-scheme"
        self.tell("Emulation.setEmulatedMedia", features=[{"name": feature, "value": "dark"}])
        self.settle()
        yield
        self.tell("Emulation.setEmulatedMedia", features=[])

    @contextmanager
    def phone(self) -> Iterator[None]:
        """Be as narrow as a phone."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=390, height=844, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        yield
        self.tell("Emulation.clearDeviceMetricsOverride")

    @contextmanager
    def no_script(self) -> Iterator[None]:
        """Run no script of a page."""
        self.tell("Emulation.setScriptExecutionDisabled", value=True)
        try:
            yield
        finally:
            self.tell("Emulation.setScriptExecutionDisabled", value=False)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let the page believe that nobody sees it."""
        self.driver.execute_script(_HIDDEN, True)
        yield
        self.driver.execute_script(_HIDDEN, False)

    def save(self, name: str, folder: str) -> None:
        """Keep the page as an image, also what one has to scroll to."""
        image = self.tell("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(image))

    def complaints(self) -> list[str]:
        """Give what the console says of errors, such as what the policy of the site forbids."""
        log: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [
            each["message"]
            for each in log
            if each["level"] == "SEVERE" and "favicon.ico" not in each["message"]
        ]


@contextmanager
def browsing(address: str) -> Iterator[Browser]:
    """Open a window."""
    from selenium import webdriver

    programs = [shutil.which(each) for each in ("chromium", "chromedriver")]
    if None in programs:
        without("chromium", "apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    # Its sandbox does not run for root, and /dev/shm is small in containers.
    for each in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(each)
    options.add_argument("--window-size=1280,1000")
    # A window without tabs and an address has less to draw.
    options.add_argument("--app=data:,")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    try:
        yield Browser(driver, address)
    finally:
        driver.quit()
