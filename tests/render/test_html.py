from __future__ import annotations

import re
from html.parser import HTMLParser

from lattn_compile.report import Report
from tests.render.samples import full_report, site

VOID = {"meta", "wbr"}


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    assert not parser.open
    return parser


def test_the_page_is_balanced_and_has_every_section() -> None:
    page = full_report().to_html()
    parsed = parse(page)
    assert page.startswith("<!doctype html>")
    assert re.findall("<h[12]>(.*?)</h", page) == [
        "lattn-compile report",
        "Sites",
        "What to look at",
        "Site by site",
        "Recipe",
    ]
    assert parsed.seen.count("tr") == 3  # header, the three folded layers, the one that was left
    assert "".join(parsed.text).count("DENSE_CACHE") >= 3  # summary, verdict, reason


def test_the_page_needs_no_network_and_runs_no_script() -> None:
    page = full_report().to_html()
    assert not re.search(r"https?://|<script|<link|@import|url\(|src=", page)


def test_every_site_shows_its_graph_before_and_after_with_the_changed_lines_marked() -> None:
    page = full_report().to_html()
    assert page.count("<figcaption>before</figcaption>") == 4
    assert '<span class="gone">q_1 = l2norm(q);  q = None</span>' in page
    assert '<span class="new">out = torch.ops.lattn.chunk(' in page
    assert "<span>o = out[0];  out = None</span>" in page
    assert "not recorded" in page  # the site that was left has no second graph


def test_what_the_model_wrote_cannot_become_markup() -> None:
    evil = "<script>alert('x')</script>"
    report = Report(
        sites=[site(0, path=evil, id=evil, call=evil, source=evil, graph_before=evil, evidence={evil: evil})],
        notes=[evil],
    )
    page = report.to_html()
    parse(page)
    assert "<script" not in page


def test_an_empty_report_is_a_page_too() -> None:
    page = Report().to_html()
    parse(page)
    assert "No linear-attention recurrence was found." in page


def test_links_of_the_table_lead_to_the_sites() -> None:
    page = full_report().to_html()
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(re.findall(r' id="([^"]+)"', page))
