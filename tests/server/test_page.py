"""The page for people: one file that loads nothing, needs no key, and can be left out."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

from jaxinfer.server.page import policy
from tests.server.processes import serving

PAGE = (files("jaxinfer.server") / "page.html").read_text()


class Tags(HTMLParser):
    """Start tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def digest(tag: str) -> str:
    """The hash of the only element of this tag, as a policy has it."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_is_served_with_a_policy_that_allows_its_own_style_and_script_alone(server):
    status, headers, body = server.request("GET", "/")
    assert status == 200 and body.decode() == PAGE and headers["content-type"] == "text/html; charset=utf-8"
    directives = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert directives == {
        "default-src": "'none'", "style-src": digest("style"), "script-src": digest("script"), "connect-src": "'self'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }  # fmt: skip
    names = ("x-content-type-options", "x-frame-options", "referrer-policy")
    assert [headers[name] for name in names] == ["nosniff", "DENY", "no-referrer"]


def test_another_script_has_another_policy():
    assert policy(PAGE.encode()) != policy(PAGE.replace("<script>", "<script> ").encode())


def test_the_page_needs_no_key_while_what_it_asks_does(server):
    assert server.request("GET", "/", headers={"authorization": ""})[0] == 200
    for path in ("/v1/models", "/load", "/page.html", "//"):
        assert server.request("GET", path, headers={"authorization": ""})[0] == 401


def test_head_has_the_headers_alone(server):
    status, headers, body = server.request("HEAD", "/")
    assert status == 200 and body == b"" and int(headers["content-length"]) == len(PAGE.encode())
    assert "content-security-policy" in headers
    assert server.request("POST", "/", {})[0] == 405


def test_the_document_of_the_api_has_it(server):
    described = server.json("GET", "/openapi.json")["paths"]["/"]
    assert list(described) == ["get"] and list(described["get"]["responses"]["200"]["content"]) == ["text/html"]
    assert "security" not in described["get"]


def test_the_page_loads_and_names_nothing_outside_itself():
    names = [value or "" for _, attributes in Tags(PAGE).found for value in attributes.values()]
    icons = [value for value in names if value.startswith("data:image/svg+xml,")]
    assert len(icons) == 1
    rest = PAGE.replace("xmlns='http://www.w3.org/2000/svg'", "")
    assert not re.search(r"https?:|//[a-z0-9]|\burl\(|@import|\bimport\b", rest.replace("// ", ""), re.IGNORECASE)
    assert not [
        tag for tag, attributes in Tags(PAGE).found if "src" in attributes or tag in ("iframe", "object", "base")
    ]


def test_the_page_has_no_attributes_that_its_policy_forbids_and_writes_text_as_text():
    attributes = {name for _, found in Tags(PAGE).found for name in found}
    assert not [name for name in attributes if name == "style" or name.startswith("on")]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE)


def test_every_field_of_the_page_has_a_label():
    tags = Tags(PAGE).found
    labelled = {attributes["for"] for tag, attributes in tags if tag == "label" and "for" in attributes}
    wrapped = re.findall(r"<label[^>]*>(?:(?!</label>).)*?<input[^>]*>", PAGE, re.DOTALL)
    for tag, attributes in tags:
        if tag in ("input", "textarea"):
            text = attributes.get("id") or attributes.get("value") or ""
            assert text in labelled or any(f'"{text}"' in label for label in wrapped), attributes


def test_the_page_can_be_left_out():
    with serving("--no-page", "--warm-up", "off", "--kv-cache-tokens", "1024", ready=False) as server:
        assert server.request("GET", "/")[0] == 404
        assert "/" not in server.json("GET", "/openapi.json")["paths"]
