"""The try-it page, used as a person would: what it shows is what the service answers."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import FilePayload, Page, Route, expect

import tessera.frontend.page
from tessera import heif
from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL
from tests.page.conftest import Open
from tests.page.prefix import under_prefix

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

EXAMPLES = Path(tessera.frontend.page.__file__).parent / "examples"
# Made to break out of HTML, of a shell's quotes, and of a printf format.
NASTY = "<img src=x onerror=document.title='broken'> it's $(touch broken) %s \\ \".jpg"


@pytest.fixture(scope="module")
def open_url(service: Disaggregated) -> Iterator[str]:
    """The same service without keys, under a path as a proxy would put it."""
    with service.frontend() as url, under_prefix(url, "/try/tessera") as prefixed:
        yield prefixed


@pytest.fixture
def files(tmp_path: Path, photos: dict[str, bytes]) -> list[Path]:
    """Two photographs, one of them named to do harm, and a file that is no picture."""
    made = [tmp_path / "china.jpg", tmp_path / NASTY, tmp_path / "torn.png"]
    for path, data in zip(made, [photos["china"], photos["flower"], b"\x89PNG\r\n\x1a\n torn"], strict=True):
        path.write_bytes(data)
    return made


def scores(page: Page) -> list[tuple[str, str]]:
    """(name, score) of every card in the order shown."""
    cards = page.locator("#results > li")
    names = cards.locator(".name").all_text_contents()
    return list(zip(names, cards.locator(".score span").all_text_contents(), strict=True))


def wait_ranked(page: Page, count: int) -> None:
    expect(page.locator("#pictures-state")).to_have_text(
        f"{count} picture{'s' if count > 1 else ''} ranked", timeout=60_000
    )


def test_a_suggestion_ranks_the_examples(page: Page, service: Disaggregated) -> None:
    listed = json.loads((EXAMPLES / "examples.json").read_text())
    query = listed["queries"][0]
    page.get_by_role("button", name=query).click()
    wait_ranked(page, len(listed["pictures"]))
    names = [entry["file"] for entry in listed["pictures"]]
    pictures = np.array(service.embed(*(parts(None, (EXAMPLES / name).read_bytes()) for name in names)))
    (asked,) = np.array(service.embed(query, input_type="query"))
    expected = sorted(zip(pictures @ asked, names, strict=True), reverse=True)
    shown = scores(page)
    assert [float(score) for _, score in shown] == pytest.approx([cosine for cosine, _ in expected], abs=2e-3)
    # Names are compared where the scores are not as good as equal.
    assert shown[0][0] == expected[0][1] or expected[0][0] - expected[1][0] < 1e-3
    assert page.get_by_role("img", name=listed["pictures"][0]["caption"]).count() == 1


def test_a_search_that_comes_before_the_service_has_answered_is_made_then(
    open_url: str, opened: Open, files: list[Path]
) -> None:
    page = opened("about:blank")
    held: list[Route] = []
    page.route("**/status", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/status"):
        page.goto(open_url)
    page.locator("#files").set_input_files(files[:1])
    page.get_by_label("What are you looking for?").fill("a temple")
    page.keyboard.press("Enter")
    expect(page.locator("#search-error")).to_have_text("Waiting for the service.")
    # The answer moves what stands here; nothing that would move is offered to a pointer before.
    expect(page.locator("#suggestions")).to_be_hidden()
    held[0].continue_()
    wait_ranked(page, 1)
    expect(page.locator("#search-error")).to_have_text("")
    expect(page.locator("#suggestions")).to_be_visible()


def test_files_are_ranked_and_a_torn_one_is_named(page: Page, files: list[Path]) -> None:
    page.locator("#files").set_input_files(files)
    expect(page.locator("#failures")).to_contain_text("torn.png")
    page.get_by_label("What are you looking for?").fill("a flower")
    page.keyboard.press("Enter")
    wait_ranked(page, 2)
    assert {name for name, _ in scores(page)} == {"china.jpg", NASTY}
    assert page.title() == "Tessera: try it"
    # A picture is its own nearest neighbour.
    page.get_by_role("button", name="Similar to china.jpg").click()
    expect(page.locator("#results > li").first).to_contain_text("1.000")
    assert scores(page)[0] == ("china.jpg", "1.000")
    usage = page.locator("#usage")
    expect(usage).to_contain_text("of them from the cache")
    image, cached = (usage.locator("dd").nth(index).inner_text() for index in (1, 2))
    assert image == cached != "0"
    assert page.locator("#timings dt").all_text_contents()[:2] == ["queue", "preprocess"]


def test_pictures_of_phones_are_taken_where_the_service_reads_them(
    page: Page, tmp_path: Path, photos: dict[str, bytes]
) -> None:
    kinds = {"phone.avif": "AVIF", **({"phone.heic": "HEIF"} if heif.installed() else {})}
    heif.load_codecs()
    with Image.open(io.BytesIO(photos["china"])) as image:
        for name, kind in kinds.items():
            image.save(tmp_path / name, kind)
    (tmp_path / "phone.jxl").write_bytes(b"\xff\x0a")
    page.locator("#files").set_input_files([tmp_path / name for name in (*kinds, "phone.jxl")])
    expect(page.locator("#failures")).to_contain_text("phone.jxl: none of what is read here: jpeg, png")
    # As from a system that knows no type of it.
    untyped = FilePayload(name="other.avif", mimeType="", buffer=(tmp_path / "phone.avif").read_bytes())
    page.locator("#files").set_input_files([untyped])
    page.get_by_label("What are you looking for?").fill("a temple")
    page.keyboard.press("Enter")
    wait_ranked(page, len(kinds) + 1)
    assert {name for name, _ in scores(page)} == {*kinds, "other.avif"}


def test_the_command_gives_the_same_vector(
    page: Page, files: list[Path], tmp_path: Path, service: Disaggregated
) -> None:
    text = 'it\'s "$HOME" `id` \\u0000 %s'
    page.locator("#query-file").set_input_files(files[1])
    page.get_by_label("What are you looking for?").fill(text)
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#request-summary")).to_contain_text("The query")
    command = page.locator("#curl").text_content()
    assert command is not None and service.key not in command
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"TESSERA_API_KEY": service.key},
        capture_output=True,
        timeout=180,
        check=True,
    )
    (row,) = json.loads(ran.stdout)["data"]
    (expected,) = service.embed(parts(text, files[1].read_bytes()))
    assert row["embedding"] == pytest.approx(expected, abs=1e-4)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in files)


def test_drops_and_pastes_are_taken(page: Page, photos: dict[str, bytes]) -> None:
    send = """([event, property, name, type, data]) => {
        const transfer = new DataTransfer();
        const raw = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
        transfer.items.add(new File([raw], name, { type }));
        const kind = event === "drop" ? DragEvent : ClipboardEvent;
        document.body.dispatchEvent(new kind(event, { [property]: transfer, bubbles: true }));
    }"""
    flower, china = (base64.b64encode(photos[name]).decode() for name in ("flower", "china"))
    page.evaluate(send, ["drop", "dataTransfer", "flower.jpg", "image/jpeg", flower])
    page.evaluate(send, ["paste", "clipboardData", "china.jpg", "image/jpeg", china])
    page.evaluate(send, ["drop", "dataTransfer", "notes.txt", "text/plain", flower])
    expect(page.locator("#failures")).to_contain_text("notes.txt: none of what is read here: jpeg, png")
    expect(page.locator("#pictures-state")).to_have_text("2 pictures ready to search", timeout=60_000)
    page.get_by_role("button", name="Remove all").click()
    expect(page.locator("#results > li")).to_have_count(0)


def test_pictures_wait_for_a_service_that_is_away(page: Page, files: list[Path]) -> None:
    page.context.set_offline(True)
    page.locator("#files").set_input_files(files)
    expect(page.locator("#failures")).to_contain_text("The service does not answer.")
    expect(page.locator("#health")).to_have_text("Not reachable")
    expect(page.locator("#pictures-state")).to_have_text("0 of 3 embedded")
    page.context.set_offline(False)
    # Nobody has to ask for it; the torn one is named then.
    expect(page.locator("#pictures-state")).to_have_text("2 pictures ready to search", timeout=60_000)
    expect(page.locator("#failures")).to_contain_text("torn.png")


def test_everything_can_be_done_from_the_keyboard(page: Page, files: list[Path]) -> None:
    page.locator("#files").set_input_files(files[:1])
    expect(page.locator("#pictures-state")).to_have_text("1 picture ready to search", timeout=60_000)
    page.get_by_role("link", name="Skip to the search").focus()
    passed = []
    for _ in range(40):
        page.keyboard.press("Tab")
        passed.append(
            page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
            )
        )
        if passed[-1] == "Remove china.jpg":
            break
    order = [
        "Search",
        "Add a picture to the query",
        "Choose files",
        "Take the examples",
    ]
    order += ["Remove all", "Similar to china.jpg", "Remove china.jpg"]
    assert [name for name in passed if name in order] == order
    page.keyboard.press("Enter")
    expect(page.locator("#results > li")).to_have_count(0)
    # The button that had the focus is gone; the focus is not lost with it.
    assert page.evaluate("document.activeElement.id") == "choose"


def test_a_wrong_key_is_said_and_asked_for_once(service: Disaggregated, opened: Open) -> None:
    page = opened(service.url)
    page.get_by_label("This service asks for an API key").fill("sk-wrong-0123456789")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_have_text("The service does not know this key.")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    for _ in range(2):
        page.wait_for_event("requestfinished", lambda request: request.url.endswith("/health"))
    # While it waits for a key it asks nothing that needs one.
    assert "status" not in asked


def test_the_state_of_workers_and_caches_is_shown(page: Page, files: list[Path]) -> None:
    page.locator("#files").set_input_files(files[:1])
    expect(page.locator("#pictures-state")).to_have_text("1 picture ready to search", timeout=60_000)
    workers = page.locator("#workers > li")
    expect(workers).to_have_count(2)
    embed = workers.filter(has_text="Embed worker")
    expect(embed).to_contain_text("text queue")
    expect(embed.locator("dl > div").filter(has_text="cached images")).not_to_have_text("cached images0")
    encode = workers.filter(has_text="Encode worker")
    expect(encode).to_contain_text("vision queue")
    expect(encode).to_contain_text("hand-off memory")
    # The random checkpoint says what it is.
    expect(page.locator("#notice-random")).to_be_visible()
    expect(page.locator("#notice-demo")).to_be_hidden()


def test_it_works_under_a_path_without_keys_and_asks_nobody_else(open_url: str, opened: Open) -> None:
    page = opened("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    # Without the slash at the end, as people type it.
    page.goto(open_url)
    page.get_by_role("button", name="Take the examples").click()
    expect(page.locator("#pictures-state")).to_contain_text("ready to search", timeout=60_000)
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#curl")).to_contain_text(f"{open_url}/v1/embeddings")
    abroad = [url for url in asked if not url.startswith((open_url, "blob:", "data:"))]
    assert abroad == []


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (1200, "light")])
def test_it_is_accessible_at_any_width(open_url: str, opened: Open, scheme: str, width: int) -> None:
    page = opened(
        open_url, viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    page.locator("#suggestion-list button").first.click()
    expect(page.locator("#pictures-state")).to_contain_text("ranked", timeout=60_000)
    expect(page.locator("#workers > li")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    moving = (
        "[...document.querySelectorAll('*')].filter(e => parseFloat(getComputedStyle(e).transitionDuration))"
    )
    assert page.evaluate(f"{moving}.length") == 0


def test_nothing_that_gets_into_the_page_can_run(open_url: str, opened: Open) -> None:
    page = opened(open_url)
    refused = """() => new Promise((resolve) => {
        document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
        %s
    })"""
    script = (
        "const s = document.createElement('script'); s.append('document.title = 1'); document.body.append(s);"
    )
    picture = "const i = new Image(); i.src = 'http://192.0.2.1/x.png'; document.body.append(i);"
    assert page.evaluate(refused % script).startswith(("script-src", "require-trusted-types"))
    assert page.evaluate(refused % picture) == "img-src"
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.title() == "Tessera: try it"


def test_the_page_is_open_and_the_state_is_not(service: Disaggregated) -> None:
    with httpx.Client(base_url=service.url) as client:
        answer = client.get("/")
        assert answer.status_code == 200
        assert "'unsafe" not in answer.headers["content-security-policy"]
        again = client.get("/", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.head("/").headers["content-length"] == answer.headers["content-length"]
        assert client.get("/examples/examples.json").json()["pictures"]
        assert client.get("/examples/..%2fpage.css").status_code in (401, 404)
        assert client.get("/status").status_code == 401
        shown = client.get("/status", headers={"authorization": f"Bearer {service.key}"}).json()
    assert shown["model"] == MODEL
    assert [worker["role"] for worker in shown["workers"]] == ["embed", "encode"]
