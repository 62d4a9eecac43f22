"""TensorBoard as a person sees it: a real server, a real headless Chromium, and what is on its page.

python tests/browser.py LOGDIR PICTURE.png      writes a screenshot of the Images tab
"""

import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

# Elements that match a selector, through all shadow roots: TensorBoard is built of web components.
FIND_ALL = """
const found = [];
const search = (root) => {
  found.push(...root.querySelectorAll(arguments[0]));
  for (const element of root.querySelectorAll('*')) if (element.shadowRoot) search(element.shadowRoot);
};
search(document);
"""


@contextmanager
def tensorboard(logdir):
    """The address of a TensorBoard of this folder, while it lasts."""
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(logdir), "--port", "0", "--load_fast", "false"])
    yield board.launch()


@contextmanager
def chromium(width, height):
    """A headless Chromium of its own profile."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield browser
        finally:
            browser.quit()


def until(condition, seconds=600):
    """What `condition()` gives, as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not come to what was waited for"
        time.sleep(0.05)
    return value


def shown_panels(browser):
    """Of each loaded picture on the page: its true size, its size on the page, and its address."""
    return browser.execute_script(
        FIND_ALL
        + """
        return found.filter((image) => image.complete && image.naturalWidth > 0 && image.src.includes('images'))
          .map((image) => ({
            natural: [image.naturalWidth, image.naturalHeight],
            shown: [image.getBoundingClientRect().width, image.getBoundingClientRect().height],
            source: image.src,
          }));""",
        "img",
    )


def open_images_tab(browser, address, panels):
    """Open the Images tab and all of its groups, of which TensorBoard opens two, and wait for that many panels."""
    browser.get(f"{address}#images")
    until(lambda: shown_panels(browser))
    browser.execute_script(FIND_ALL + "for (const heading of found.slice(2)) heading.click();", "button.heading")
    return until(lambda: (shown := shown_panels(browser)) and len(shown) >= panels and shown)


if __name__ == "__main__":
    logdir, picture = sys.argv[1:]
    with tensorboard(logdir) as url, chromium(1120, 1290) as page:
        open_images_tab(page, url, 1)
        time.sleep(3)
        Path(picture).write_bytes(page.get_screenshot_as_png())
