"""The dashboard in a real browser (headless Chromium), over a real server, node and sandbox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from aenv_run import Sandbox
from aenv_run.paths import Home

KEY = "k" * 40
PATIENCE_S = 60


@contextmanager
def server(home: Home) -> Iterator[str]:
    """`aenv serve` as a process; its URL."""
    environment = {**os.environ, "AENV_HOME": str(home.root), "AENV_API_KEY": KEY}
    command = [sys.executable, "-m", "aenv_run.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            told = process.stderr.readline()
            found = re.match(r"serving (http://\S+)", told)
            assert found, told
            yield found.group(1)
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


@contextmanager
def chromium(profile: Path) -> Iterator[WebDriver]:
    """A headless browser whose files are all in ``profile``."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     f"--user-data-dir={profile}", "--window-size=1200,900"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


def shown(browser: WebDriver, css: str, text: str) -> None:
    """Return when an element that matches shows the text; the page may have renewed it meanwhile."""

    def there(_: WebDriver) -> bool:
        script = (
            "return [...document.querySelectorAll(arguments[0])].some(e => e.textContent.includes(arguments[1]))"
        )
        return bool(browser.execute_script(script, css, text))

    try:
        WebDriverWait(browser, PATIENCE_S).until(there)
    except TimeoutException:
        pytest.fail(f"{css} never showed {text!r}; the page: {browser.find_element(By.TAG_NAME, 'body').text}")


def press(browser: WebDriver, words: str) -> None:
    """The button with these words."""
    browser.find_element(By.XPATH, f"//button[normalize-space()='{words}']").click()


@pytest.mark.timeout(300)
def test_log_in_look_type_pause_and_kill(home: Home, tmp_path: Path) -> None:
    with server(home) as url, Sandbox.create("tiny", metadata={"run": "<b>7</b>"}, home=home) as sandbox, \
            chromium(tmp_path / "profile") as browser:  # fmt: skip
        browser.get(f"{url}/ui")
        browser.find_element(By.ID, "key").send_keys(KEY + Keys.ENTER)
        shown(browser, "td.id", sandbox.sandbox_id)
        shown(browser, "td", "run=<b>7</b>")
        browser.find_element(By.LINK_TEXT, sandbox.sandbox_id).click()
        shown(browser, ".terminal .status", "connected")
        screen = browser.find_element(By.CSS_SELECTOR, ".terminal .screen")
        screen.send_keys("echo $((6*7))-" + Keys.ENTER)
        shown(browser, ".terminal .line", "42-")
        screen.send_keys("echo $((8*8))-; cat" + Keys.ENTER)
        shown(browser, ".terminal .line", "64-")  # the shell reads no line now: what is typed is cat's
        screen.send_keys("typed" + Keys.CONTROL + "c" + Keys.NULL + "echo after=$?" + Keys.ENTER)
        shown(browser, ".terminal .line", "after=130")
        screen.send_keys("exit" + Keys.ENTER)
        shown(browser, ".terminal .status", "the shell has ended")
        shown(browser, "pre", "started")
        press(browser, "Pause")
        shown(browser, "td.paused", "paused")
        press(browser, "Resume")
        shown(browser, "td.running", "running")
        press(browser, "Kill")
        browser.switch_to.alert.accept()
        shown(browser, "h1", "Sandboxes")
        assert not sandbox.kill()
        browser.find_element(By.LINK_TEXT, "Catalog").click()
        browser.find_element(By.LINK_TEXT, "tiny").click()
        shown(browser, "svg text", "tiny:1")
        errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
        assert not errors, errors
