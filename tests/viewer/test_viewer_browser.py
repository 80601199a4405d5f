"""The viewer in a real Chromium: what a person sees and does."""

import base64
import io
import json
import shutil
import threading

import numpy as np
import pytest
from PIL import Image
from tests.viewer.viewer_runs import HOSTILE, write_cohort, write_overlapping, write_run

from its2clr.cohort.tiles import decode
from its2clr.run.scores import Model, RunScores
from its2clr.viewer.app import create_app
from its2clr.viewer.serve import Guard, listen
from its2clr.viewer.service import Viewer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]


class Served:
    """A viewer on a free port, in a thread."""

    def __init__(self, run, *, local=True):
        import uvicorn

        self.viewer = Viewer(run)
        listening = listen("127.0.0.1", 0)
        self.root = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        self.address = f"{self.root}?token=k"
        app = Guard(create_app(self.viewer), token="k", local=local)
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([listening],), daemon=True)
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.viewer.close()


@pytest.fixture(scope="module")
def served(evaluated_run):
    server = Served(evaluated_run)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile-browser")
    server = Served(write_run(folder / "run", write_cohort(folder / "cohort", HOSTILE)), local=False)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


class Watched:
    """A page, and everything on it that went wrong."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.page = self.context.new_page()
        self.wrong = []
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", lambda got: self.wrong.append(f"{got.url} {got.status}") if got.status > 399 else None)
        self.page.on("dialog", self._refuse)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.asked = []

    def _heard(self, said):
        # OpenSeadragon remarks on a tile of the last bag that comes when the next one is open.
        if said.type in {"error", "warning"} and not said.text.startswith("Ignoring tile"):
            self.wrong.append(said.text)

    def _failed(self, request):
        if request.failure != "net::ERR_ABORTED":  # what is on its way when the page is left or closed
            self.wrong.append(f"{request.url} {request.failure}")

    def _refuse(self, dialog):
        self.wrong.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def open(self, address):
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready=true]")
        return self.page


@pytest.fixture
def watched(browser):
    found = Watched(browser)
    yield found
    found.context.close()
    assert found.wrong == []


def wait_for_bag(page, name):
    """Until a bag is open, its picture drawn and its heat painted."""
    page.wait_for_function(
        "name => document.querySelector('#heading h1')?.textContent === name"
        " && document.getElementById('stage').getAttribute('aria-busy') === 'false'",
        arg=name,
    )


def list_by_name(page):
    """All bags by name, instead of the test bags from the most suspicious down."""
    show_list(page)
    page.select_option("#split", "")
    page.select_option("#sort", "bag")
    page.click("#direction")
    page.wait_for_function(
        "() => { const names = [...document.querySelectorAll('.bag .name')].map((one) => one.textContent);"
        " return names.length > 1 && names.every((name, n) => n === 0 || names[n - 1] < name)"
        " && document.getElementById('bags').getAttribute('aria-busy') === 'false'; }"
    )


def show_list(page):
    if page.is_visible("#pane-bags"):  # in a narrow window
        page.click("#pane-bags")


def click_bag(page, place, name):
    show_list(page)
    page.click(f"#bag-{place}")
    wait_for_bag(page, name)


def wait_for_text(page, selector, text):
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent === text", arg=[selector, text]
    )


def pixels(page, selector):
    """What a canvas shows: height, width, RGBA."""
    address = page.evaluate("selector => document.querySelector(selector).toDataURL('image/png')", selector)
    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        return np.asarray(image.convert("RGBA"))


def heat(page):
    return pixels(page, "#heat")


def set_slider(page, name, value):
    page.evaluate(
        "([id, value]) => { const s = document.getElementById(id); s.value = value;"
        " s.dispatchEvent(new Event('input', {bubbles: true})); }",
        [name, value],
    )


def show_all(page):
    set_slider(page, "threshold", 0)


def place_of(page, bag, instance):
    """Where the middle of an instance lies on the page, found from the heat: the picture is fitted and centred."""
    box = page.locator("#picture").bounding_box()
    scale = min(box["width"] / bag["width"], box["height"] / bag["height"])
    x, y = (place + bag["side"] / 2 for place in bag["coords"][instance])
    left = box["x"] + (box["width"] - bag["width"] * scale) / 2
    top = box["y"] + (box["height"] - bag["height"] * scale) / 2
    return left + x * scale, top + y * scale


def first_of(served, split, label=1):
    """Number and name of the first bag of a split."""
    bags = RunScores(served.viewer.shown.run.run).cohort.bags
    number = int(np.flatnonzero((bags["split"] == split) & (bags["label"] == label))[0])
    return number, bags["bag_id"][number]


def test_a_bag_is_chosen_with_the_mouse_and_its_heat_is_right(served, watched):
    page = watched.open(served.address)
    number, name = first_of(served, "test")
    page.fill("#search", name)
    page.wait_for_function("() => document.querySelectorAll('.bag').length === 1")
    page.click(".bag")
    wait_for_bag(page, name)
    show_all(page)
    scores = served.viewer.shown.run.bag(name)
    bag = served.viewer.bag(number)
    shown = heat(page)
    corner = page.locator("#picture").bounding_box()
    viridis = served_colours(page)
    for instance, probability in enumerate(scores.instances):
        x, y = place_of(page, bag, instance)
        found = shown[round(y - corner["y"]), round(x - corner["x"])]
        assert found.tolist() == [*viridis[round(probability * 255)], 255]
    # exact squares: as many coloured pixels as the fitted picture has
    side = min(corner["width"], corner["height"])
    assert abs((shown[..., 3] > 0).sum() - side**2) / side**2 < 0.01
    assert f"{len(scores.instances)} of {len(scores.instances)}" in page.inner_text("#count")
    assert page.inner_text("#heading .badge:last-child").startswith(f"ItS2CLR + dsmil: {scores.probability:.3f}")


def served_colours(page):
    return page.evaluate(
        "async () => { const {colour} = await import('/static/colours.js');"
        " const part = (n, i) => parseInt(colour(n / 255).slice(i, i + 2), 16);"
        " return Array.from({length: 256}, (_, n) => [1, 3, 5].map(i => part(n, i))); }"
    )


def test_the_colours_are_viridis(served, watched):
    from matplotlib import colormaps

    expected = np.array(colormaps["viridis"].colors) * 255
    np.testing.assert_array_equal(served_colours(watched.open(served.address)), expected.round())


def test_bags_are_walked_with_the_keys(served, watched):
    page = watched.open(served.address)
    bag_ids = served.viewer.table.bag_id
    list_by_name(page)
    click_bag(page, 0, bag_ids[0])
    page.keyboard.press("j")
    wait_for_bag(page, bag_ids[1])
    page.keyboard.press("k")
    wait_for_bag(page, bag_ids[0])
    page.keyboard.press("l")
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert page.get_attribute("#bags", "aria-activedescendant") == "bag-2"
    assert page.inner_text("#heading h1") == bag_ids[0]
    page.keyboard.press("Enter")
    wait_for_bag(page, bag_ids[2])
    assert page.get_attribute("#bag-2", "aria-selected") == "true"
    page.keyboard.press("?")
    assert page.is_visible("#help")
    assert page.locator("#keys tr").count() > 15
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")


def test_a_key_waits_for_the_list_that_was_asked_for(served, watched):
    page = watched.open(served.address)
    table, waiting = served.viewer.table, []

    def hold(route):
        waiting.append(route)

    page.route("**/api/bags?*", hold)
    page.select_option("#split", "val")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    while not waiting:
        page.wait_for_timeout(20)
    waiting[0].continue_()
    wait_for_bag(page, most_suspicious(table, "val"))


def most_suspicious(table, split):
    """The bag of a split with the highest probability by the model that is shown first."""
    best = table.probability[table.models.index(Model("refined", "dsmil"))]
    numbers = [number for number, one in enumerate(table.split) if one == split]
    return table.bag_id[max(numbers, key=lambda number: best[number])]


def test_it_opens_on_the_most_suspicious_test_bag(served, watched):
    page = watched.open(served.address)
    table = served.viewer.table
    wait_for_bag(page, most_suspicious(table, "test"))
    assert page.get_attribute("#bag-0", "aria-selected") == "true"
    shown = page.locator(".bag .score").all_inner_texts()
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == table.split.count("test")


def test_the_list_has_thumbnails(served, watched):
    page = watched.open(served.address)
    page.wait_for_function("() => document.querySelector('.bag img').naturalWidth > 0")
    first = page.get_attribute(".bag img", "src")
    number = served.viewer.table.number[page.inner_text(".bag .name")]
    assert first == f"api/bags/{number}/thumbnail"
    with Image.open(io.BytesIO(served.viewer.thumbnail(number))) as found:
        assert max(found.size) == 96
        whole = served.viewer.pictures.jpeg(number, 7, 0, 0)
        with Image.open(io.BytesIO(whole)) as picture:
            expected = np.asarray(picture.resize(found.size, Image.Resampling.BOX), dtype=int)
        assert np.abs(np.asarray(found, dtype=int) - expected).mean() < 12


def test_heat_follows_threshold_opacity_and_model(served, watched):
    number, name = first_of(served, "test")
    page = watched.open(f"{served.address}#bag={number}")
    wait_for_bag(page, name)
    show_all(page)
    everything = heat(page)
    scores = served.viewer.shown.run.bag(name)
    middle = float(np.sort(scores.instances)[len(scores.instances) // 2])
    set_slider(page, "threshold", f"{middle:.2f}")
    some = heat(page)
    share = (some[..., 3] > 0).sum() / (everything[..., 3] > 0).sum()
    assert share == pytest.approx((scores.instances >= float(f"{middle:.2f}")).mean(), abs=0.02)
    show_all(page)
    box = page.locator("#picture").bounding_box()
    set_slider(page, "opacity", 1)
    strong = page.screenshot(clip=box)
    set_slider(page, "opacity", 0.2)
    assert page.screenshot(clip=box) != strong
    assert page.evaluate("getComputedStyle(document.getElementById('heat')).opacity") == "0.2"
    page.select_option("#model", "start+dsmil")
    page.wait_for_function("() => document.getElementById('shown').textContent.startsWith('SimCLR')")
    other = heat(page)
    assert (other != everything).any()
    viridis = served_colours(page)
    x, y = place_of(page, served.viewer.bag(number), 0)
    expected = served.viewer.shown.run.bag(name, Model("start", "dsmil")).instances[0]
    assert other[round(y - box["y"]), round(x - box["x"])].tolist() == [*viridis[round(expected * 255)], 255]
    page.uncheck("#show-heat")
    assert not heat(page).any()


def test_heat_stays_on_its_tiles_at_every_zoom(hostile, watched):
    """Every tile has a colour of its own: where the picture shows it, the heat must show that tile's score."""
    number = hostile.viewer.table.number[HOSTILE[2]]
    page = watched.open(f"{hostile.address}#bag={number}")
    wait_for_bag(page, HOSTILE[2])
    show_all(page)
    viridis = np.array(served_colours(page))
    probability = hostile.viewer.bag_scores(number, hostile.viewer.model(None))["probability"]
    colours = [decode(hostile.viewer.instance_image(number, i)[0])[0, 0] for i in range(len(probability))]
    expected = viridis[(np.array(probability) * 255).round().astype(int)]
    views = []
    for act in ("fitted", "wheel", "button", "drag", "out"):
        if act == "wheel":
            page.mouse.move(500, 300)
            page.mouse.wheel(0, -300)
        elif act == "button":
            page.click("#zoom-in")
        elif act == "drag":
            page.mouse.move(600, 400)
            page.mouse.down()
            page.mouse.move(687, 431, steps=4)
            page.mouse.up()
        elif act == "out":
            for _ in range(6):
                page.keyboard.press("-")
        page.wait_for_timeout(900)  # the picture glides to its new place
        picture, shown = pixels(page, "#picture canvas")[::3, ::3], heat(page)[::3, ::3]
        distance = np.abs(picture[..., None, :3].astype(int) - np.array(colours, dtype=int)).sum(axis=-1)
        tile, sure = distance.argmin(axis=-1), (distance.min(axis=-1) < 12) & (picture[..., 3] == 255)
        assert sure.mean() > 0.02
        right = (shown[..., :3] == expected[tile]).all(axis=-1)
        assert right[sure].mean() > 0.985
        views.append(shown.tobytes())
    assert len(set(views)) == len(views)


def test_rounds_change_the_heat_and_mark_the_pseudo_labels(served, watched):
    number, name = first_of(served, "train")
    page = watched.open(f"{served.address}#bag={number}")
    wait_for_bag(page, name)
    show_all(page)
    page.uncheck("#show-truth")
    final, plain = heat(page), pixels(page, "#marks")
    assert not plain.any()
    rounds = served.viewer.shown.run.rounds
    seen = []
    for epoch in reversed(rounds):
        page.keyboard.press("[")
        wait_for_text(page, "#shown", f"round after epoch {epoch}")
        seen.append(heat(page))
        assert pixels(page, "#marks").any()
        found = served.viewer.round_scores(number, epoch)
        assert page.inner_text("#count-positive") == str(found["selected"].count(1))
        assert page.inner_text("#count-negative") == str(found["selected"].count(-1))
        assert f"after epoch {epoch}" in page.inner_text("#round-text")
    assert all((one != final).any() for one in seen)
    assert (seen[0] != seen[-1]).any()
    page.locator("#round").focus()
    page.keyboard.press("End")
    wait_for_text(page, "#round-text", "final model")
    np.testing.assert_array_equal(heat(page), final)
    page.locator("#round").blur()
    page.keyboard.press(" ")
    page.wait_for_function("() => document.getElementById('round-text').textContent.startsWith('after epoch 0')")
    wait_for_text(page, "#round-text", "final model")


def test_rounds_of_a_test_bag_are_refused_with_the_reason(served, watched):
    number, name = first_of(served, "test")
    page = watched.open(f"{served.address}#bag={number}")
    wait_for_bag(page, name)
    assert page.is_disabled("#round")
    assert page.is_disabled("#play")
    assert "training bags only" in page.inner_text("#round-text")
    page.keyboard.press("[")
    assert "round" not in page.inner_text("#shown")


def test_a_clicked_instance_shows_tile_scores_and_neighbours(served, watched):
    number, name = first_of(served, "train")
    page = watched.open(f"{served.address}#bag={number}")
    wait_for_bag(page, name)
    bag = served.viewer.bag(number)
    page.mouse.click(*place_of(page, bag, 6))
    wait_for_text(page, "#details h2", "Instance 6")
    page.wait_for_selector("#details .gallery button")
    found = served.viewer.instance(number, 6)
    values = page.locator("#details .scores .value").all_inner_texts()
    assert values == [f"{one['probability']:.3f}" for one in found["models"]]
    assert page.evaluate("() => document.querySelector('#details img.tile').naturalWidth") == bag["tile_size"]
    assert page.locator("#details .rounds tbody tr").count() == len(found["rounds"])
    near = served.viewer.instance_neighbours(number, 6, served.viewer.model(None))
    assert page.locator("#details .gallery button").count() == len(near["within"]["found"] + near["across"]["found"])
    other = near["across"]["found"][0]
    page.locator("#details .gallery").nth(1).locator("button").first.click()
    wait_for_bag(page, other["bag_id"])
    wait_for_text(page, "#details h2", f"Instance {other['instance']}")
    assert page.evaluate("location.hash").startswith(f"#bag={other['bag']}&instance={other['instance']}")
    page.keyboard.press("Escape")
    wait_for_text(page, "#details h2", "Bag")
    page.keyboard.press("n")
    best = int(np.argmax(served.viewer.shown.run.bag(other["bag_id"]).instances))
    wait_for_text(page, "#details h2", f"Instance {best}")


def test_the_page_comes_back_as_it_was(served, watched):
    number, name = first_of(served, "train")
    epoch = served.viewer.shown.run.rounds[0]
    page = watched.open(f"{served.address}#bag={number}&instance=3&round={epoch}&model=start%2Bdsmil")
    wait_for_bag(page, name)
    assert page.inner_text("#shown") == f"round after epoch {epoch}"
    assert page.input_value("#model") == "start+dsmil"
    assert page.inner_text("#details h2") == "Instance 3"
    page.wait_for_selector("#details .gallery button")  # nothing is asked for any more
    page.wait_for_load_state("networkidle")
    page.reload()
    wait_for_bag(page, name)
    wait_for_text(page, "#details h2", "Instance 3")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_both_schemes_and_small_windows_hold_everything(served, browser, scheme):
    watched = Watched(browser, color_scheme=scheme)
    page = watched.open(served.address)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, ground[4:-1].split(","))) < 128) == (scheme == "dark")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    for width, height in ((1280, 800), (1024, 700), (420, 800)):
        page.set_viewport_size({"width": width, "height": height})
        size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert size == [width, height]
        if width < 760:
            page.click("#menu")  # the settings are behind it
        for name in ("#help-button", "#next-page", "#legend", "#zoom-in", "#mark-undo", "#show-labels"):
            box = page.locator(name).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= height
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select')].filter((one) =>
             !one.getAttribute('aria-label') && !one.textContent.trim() && !one.labels?.length).map((one) => one.id)"""
    )
    assert unnamed == []
    watched.context.close()
    assert watched.wrong == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1000, 480), (800, 700), (700, 700), (420, 800)])
def test_the_heading_of_a_bag_is_whole_in_narrow_windows(hostile, watched, width, height):
    watched.page.set_viewport_size({"width": width, "height": height})
    page = watched.open(hostile.address)
    list_by_name(page)
    for place, name in enumerate(sorted(HOSTILE)):
        click_bag(page, place, name)
        cut = page.evaluate(
            """() => {
              const heading = document.getElementById('heading'), room = heading.getBoundingClientRect();
              return [...heading.children].filter((one) => {
                const box = one.getBoundingClientRect();
                const inside = box.left >= room.left && box.right <= room.right && box.bottom <= room.bottom;
                const alone = one.clientWidth > 0.8 * room.width; // a name longer than a line ends in dots
                return !inside || !box.width || (one.scrollWidth > one.clientWidth && !alone);
              }).map((one) => one.textContent);
            }"""
        )
        assert cut == []
        show_all(page)
        assert fits(page)  # the whole picture, in what the heading leaves


def fits(page):
    """Whether the heat of a square bag, all of it, fills its room; soon, since it is drawn again when that changes."""
    for _ in range(40):
        room = page.locator("#picture").bounding_box()
        side = min(room["width"], room["height"])
        if abs((heat(page)[..., 3] > 0).sum() / side**2 - 1) < 0.01:
            return True
        page.wait_for_timeout(50)
    return False


def test_a_fitted_picture_stays_fitted_and_another_stays_where_it_is(hostile, watched):
    page = watched.open(hostile.address)
    show_all(page)
    page.set_viewport_size({"width": 900, "height": 420})
    assert fits(page)
    page.click("#zoom-in")
    page.set_viewport_size({"width": 1200, "height": 800})
    assert not fits(page)
    page.click("#fit")
    assert fits(page)


def test_hostile_names_are_shown_as_text(hostile, watched):
    page = watched.open(hostile.address)
    assert "token" not in page.url
    list_by_name(page)
    assert page.locator(".bag .name").all_inner_texts() == sorted(HOSTILE)
    for place, name in enumerate(sorted(HOSTILE)):
        click_bag(page, place, name)
        page.keyboard.press("n")
        page.wait_for_function(
            "name => document.querySelector('#details dl')?.textContent.includes(`${name} tile`)", arg=name
        )
        page.keyboard.press("Escape")
    page.fill("#search", "<script>")
    page.wait_for_function("() => document.querySelectorAll('.bag').length === 1")
    page.fill("#search", "nothing has this name")
    page.wait_for_selector("text=No bag matches.")
    assert page.locator("script").count() == 2
    assert all(url.startswith(hostile.root) for url in watched.asked)


def test_a_late_answer_does_not_put_one_bag_under_the_name_of_another(hostile, watched):
    page = watched.open(hostile.address)
    list_by_name(page)
    first, second = (hostile.viewer.table.number[name] for name in sorted(HOSTILE)[:2])
    click_bag(page, 5, sorted(HOSTILE)[5])
    waiting = []

    def hold(route):
        waiting.append(route)

    page.route(f"**/api/bags/{first}/dzi", hold)
    page.click("#bag-0")
    while not waiting:
        page.wait_for_timeout(20)
    click_bag(page, 1, sorted(HOSTILE)[1])
    page.wait_for_timeout(500)  # its tiles are drawn
    before = pixels(page, "#picture canvas")
    waiting[0].continue_()
    page.wait_for_timeout(500)  # time enough to do harm
    shown = pixels(page, "#picture canvas")
    np.testing.assert_array_equal(shown, before)
    expected = decode(hostile.viewer.instance_image(second, 4)[0])[0, 0]
    middle = shown[shown.shape[0] // 2, shown.shape[1] // 2, :3]
    assert np.abs(middle.astype(int) - expected).max() < 8
    assert page.inner_text("#heading h1") == sorted(HOSTILE)[1]


def test_trouble_is_said_on_the_page(hostile, browser):
    watched = Watched(browser)
    page = watched.open(hostile.address)
    list_by_name(page)
    click_bag(page, 5, sorted(HOSTILE)[5])
    page.route("**/api/bags/*/scores*", lambda route: route.abort())
    page.click("#bag-0")
    page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in page.inner_text("#problem-text")
    page.unroute("**/api/bags/*/scores*")
    page.keyboard.press("j")
    wait_for_bag(page, sorted(HOSTILE)[1])
    assert not page.is_visible("#problem")
    watched.context.close()


@pytest.fixture
def overlapping(tmp_path):
    """Slides with an annotation, cut into tiles that overlap; may be marked."""
    server = Served(write_run(tmp_path / "run", write_overlapping(tmp_path / "cohort"), features=False))
    yield server
    server.stop()


def lines(page, colour):
    """Where the marks are drawn in a colour: rows, columns of the picture's element."""
    found = pixels(page, "#marks").astype(int)
    return (np.abs(found[..., :3] - np.array(colour)).sum(axis=-1) < 12) & (found[..., 3] > 250)


def test_an_outline_leaves_what_it_points_at_in_sight(served, watched):
    number, name = first_of(served, "test")
    page = watched.open(f"{served.address}#bag={number}")
    wait_for_bag(page, name)
    page.uncheck("#show-truth")
    bag, scores = served.viewer.bag(number), served.viewer.shown.run.bag(name)
    middle = float(f"{np.sort(scores.instances)[len(scores.instances) // 2]:.2f}")
    set_slider(page, "threshold", middle)
    assert heat(page).any()
    page.keyboard.press("i")
    assert page.is_checked("#show-outline")
    assert page.is_disabled("#opacity")
    assert not heat(page).any()
    assert page.is_visible("#outline-key")
    drawn, outline = pixels(page, "#marks"), lines(page, (0xFF, 0xE6, 0))
    assert outline.any()
    corner = page.locator("#picture").bounding_box()
    side = bag["side"] * min(corner["width"] / bag["width"], corner["height"] / bag["height"])
    for instance, probability in enumerate(scores.instances):
        if probability < middle:
            continue
        x, y = (round(a - b) for a, b in zip(place_of(page, bag, instance), (corner["x"], corner["y"]), strict=True))
        half = int(side / 2) - 1
        assert not drawn[y - half : y + half, x - half : x + half].any()  # nothing lies on the tile
    page.keyboard.press("h")
    assert not pixels(page, "#marks").any()


def test_an_annotation_is_drawn_as_the_person_drew_it(overlapping, watched):
    page = watched.open(f"{overlapping.address}#bag=1")
    wait_for_bag(page, "s1")
    page.uncheck("#show-heat")
    wait_for_text(page, "#truth-name", "annotation")
    corner = page.locator("#picture").bounding_box()
    scale = min(corner["width"], corner["height"]) / 192
    middle = corner["width"] / 2, corner["height"] / 2
    cyan = lines(page, (0, 0xF0, 0xFF))
    y, x = np.nonzero(cyan)
    distance = np.hypot(x - middle[0], y - middle[1]) / scale
    assert cyan.sum() > 200
    assert np.abs(distance - 40).max() < 1.5  # on the circle, and no tile box anywhere
    assert len(np.unique((np.arctan2(y - middle[1], x - middle[0]) * 8).round())) > 45  # all around


def test_without_the_annotation_the_tiles_are_outlined_together(overlapping, watched):
    (overlapping.viewer.shown.path.parent / "cohort" / "3.geojson").unlink()
    page = watched.open(f"{overlapping.address}#bag=3")
    wait_for_bag(page, "s3")
    page.uncheck("#show-heat")
    wait_for_text(page, "#truth-name", "ground truth (tiles)")
    assert "does not exist" in page.get_attribute("#truth-name", "title")
    bag = overlapping.viewer.bag(3)
    corner = page.locator("#picture").bounding_box()
    scale = min(corner["width"], corner["height"]) / 192
    covered = np.zeros((192, 192), dtype=bool)
    for (left, top), truth in zip(bag["coords"], bag["truth"], strict=True):
        if truth == 1:
            covered[top : top + 64, left : left + 64] = True
    y, x = np.nonzero(lines(page, (0, 0xF0, 0xFF)))
    left, top = (corner["width"] - 192 * scale) / 2, (corner["height"] - 192 * scale) / 2
    inside = covered[
        np.clip(((y - top) / scale).astype(int), 0, 191), np.clip(((x - left) / scale).astype(int), 0, 191)
    ]
    assert len(x) > 200
    beyond = (x < left) | (y < top) | (x >= left + 192 * scale) | (y >= top + 192 * scale)
    assert not (inside & ~beyond).any()  # no line between tiles that overlap


def test_tiles_and_areas_are_marked_and_saved(overlapping, watched):
    page = watched.open(f"{overlapping.address}#bag=1")
    wait_for_bag(page, "s1")
    page.uncheck("#show-truth")
    bag = overlapping.viewer.bag(1)
    page.click("#mark-positive")
    assert page.get_attribute("#mark-positive", "aria-pressed") == "true"
    page.mouse.click(*place_of(page, bag, 0))
    page.wait_for_function("() => document.getElementById('mark-count').textContent.includes('1 positive')")
    chosen = [n for n, one in enumerate(overlapping.viewer.marked(1)["instances"]) if one == 1]
    assert len(chosen) == 1
    page.keyboard.press("2")
    assert page.get_attribute("#mark-negative", "aria-pressed") == "true"
    before = heat(page)
    corner = page.locator("#picture").bounding_box()
    scale = min(corner["width"], corner["height"]) / 192
    left = corner["x"] + (corner["width"] - 192 * scale) / 2
    top = corner["y"] + (corner["height"] - 192 * scale) / 2
    page.mouse.move(left + 100 * scale, top + 100 * scale)
    page.mouse.down()
    for x, y in ((185, 100), (185, 185), (100, 185), (101, 103)):
        page.mouse.move(left + x * scale, top + y * scale, steps=4)
    page.mouse.up()
    page.wait_for_function("() => / [1-9] negative/.test(document.getElementById('mark-count').textContent)")
    np.testing.assert_array_equal(heat(page), before)  # the picture did not move
    assert lines(page, (0x37, 0xA0, 0xFF)).any()
    path = overlapping.viewer.marks.folder / "s1.geojson"
    features = json.loads(path.read_text())["features"]
    assert [one["properties"]["classification"]["name"] for one in features] == [
        "Confirmed positive", "Confirmed negative",
    ]  # fmt: skip
    drawn = np.array(features[1]["geometry"]["coordinates"][0])
    np.testing.assert_allclose([drawn.min(axis=0), drawn.max(axis=0)], [[100, 100], [185, 185]], atol=2)
    page.keyboard.press("Escape")
    assert page.get_attribute("#mark-negative", "aria-pressed") == "false"
    page.mouse.click(*place_of(page, bag, 0))
    page.wait_for_function("() => document.querySelector('#details h2').textContent.startsWith('Instance')")
    page.keyboard.press("u")
    wait_for_text(page, "#mark-count", "Marked tiles: 1 positive, 0 negative.")
    page.keyboard.press("3")
    page.keyboard.press("Enter")  # erases the mark of the chosen instance
    wait_for_text(page, "#mark-count", "")
    page.reload()
    wait_for_bag(page, "s1")
    page.click("#mark-undo")
    wait_for_text(page, "#mark-count", "Marked tiles: 1 positive, 0 negative.")


def test_a_narrow_window_is_enough_for_everything(served, browser):
    watched = Watched(browser, has_touch=True)
    watched.page.set_viewport_size({"width": 420, "height": 800})
    page = watched.open(served.address)
    name = most_suspicious(served.viewer.table, "test")
    wait_for_bag(page, name)
    assert page.is_visible("#picture")
    assert not page.is_visible("#bags")
    page.tap("#pane-bags")
    assert page.is_visible("#bags")
    assert not page.is_visible("#picture")
    other = page.locator(".bag .name").nth(1).inner_text()
    page.tap("#bag-1")
    wait_for_bag(page, other)
    assert page.is_visible("#picture")
    page.tap("#pane-details")
    assert page.is_visible("#details h2")
    page.tap("#details .gallery button")
    page.wait_for_function("() => document.querySelector('#details h2').textContent.startsWith('Instance')")
    assert not page.is_visible("#threshold")
    page.tap("#menu")
    page.wait_for_selector("#threshold:visible")
    for selector in ("#model", "#threshold", "#show-outline", "#menu"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 420
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    watched.context.close()
    assert watched.wrong == []


def test_predictions_are_looked_at_like_a_run(evaluated_run, tiny_cohort, tmp_path, watched):
    from its2clr.predict.new_bags import predict

    predicted = predict(evaluated_run, tiny_cohort, tmp_path / "predicted", quiet=True)
    server = Served(tmp_path / "predicted")
    page = watched.open(server.address)
    bags = predicted.bags.set_index("bag_id")
    name = page.inner_text("#heading h1")
    of_test = [bag for bag in server.viewer.table.bags if bag.split == "test"]
    assert name == max((bag.bag_id for bag in of_test), key=lambda bag_id: bags["probability"][bag_id])
    show_all(page)
    assert f"{bags['probability'][name]:.3f}" in page.inner_text("#heading .badge:last-child")
    assert page.is_disabled("#round")
    assert not page.is_visible("#no-labels")
    number = server.viewer.table.number[name]
    bag, corner = server.viewer.bag(number), page.locator("#picture").bounding_box()
    expected = predicted.instances.query("bag_id == @name")["probability"].to_numpy()
    viridis, shown = served_colours(page), heat(page)
    for instance, probability in enumerate(expected):
        x, y = place_of(page, bag, instance)
        found = shown[round(y - corner["y"]), round(x - corner["x"])].tolist()
        assert found == [*viridis[round(probability * 255)], 255]
    page.mouse.click(*place_of(page, bag, 2))
    page.wait_for_selector("#details h3:has-text('Neighbours') + div >> text=predictions hold no features")
    server.stop()
