from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest
from expecttest import assert_expected_inline

from lattn_compile.errors import REASONS, Reason, reason
from lattn_compile.render.reasons import EXAMPLES
from lattn_compile.report import Report, Unmatched
from tests.render.samples import INT8_TOKEN, candidate, full_report, left, site, spelled

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
        "Not recognised",
        "Also",
        "Site by site",
        "Reason codes",
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
    assert '<span class="gone"><i>q_1</i>  <b>l2norm</b>(<mark class="r-q" title="q">q</mark>)</span>' in page
    assert '<span class="new"><i>out</i>  <b>lattn.chunk</b>(' in page
    assert "<span><i>o</i>    out[0]</span>" in page
    assert "left as it is" in page  # the site that was left has no second graph


def test_what_the_model_wrote_cannot_become_markup() -> None:
    evil = "</pre></details><script>alert('x')</script>\"'"
    evidence = {
        evil: evil,
        "found_by": evil,
        "roles": {evil: f"mul {evil}", "q": evil},
        "self_check": {"verified": True, "max_error": evil, "shapes": evil, "seconds": evil},
        "frontier": [evil],
        "steps": evil,
    }
    texts = {"path": evil, "id": evil, "call": evil, "source": evil, "kind": evil, "kernel": evil, "op": evil}
    node = f"%mul : [num_users=1] = call_function[target={evil}](args = (%a,), kwargs = {{{evil}: {evil}}})"
    code = f"{evil}\nmul = torch.ops.aten.mul.Tensor({evil})\n{node}"
    why = Reason(code=evil, text=evil, remedy=evil)
    report = Report(
        sites=[
            site(0, **texts, graph_before=code, graph_after=evil, evidence=evidence, shapes={"B": evil}),
            left(1, why),
        ],
        unmatched=[Unmatched(path=evil, node=evil, stopped_at=evil, reason=why, source=evil, evidence={evil: evil})],
        graph_breaks=[evil],
        skipped_frames=[evil],
        recipe={"rules": [[evil, evil]]},
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
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(ids)


def fragment(page: str, start: str, end: str) -> str:
    """From `start` to `end`, a tag a line where a block ends."""
    text = page[page.index(start) :]
    return ascii_only(re.sub(r"(</dd>|</span>(?=<span)|</p>|</figure>|</summary>)", r"\1\n", text[: text.index(end)]))


def ascii_only(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode()


def test_a_spelled_out_site_says_how_it_was_found_and_what_was_verified() -> None:
    page = Report(sites=[spelled(0)], recipe={"version": 1, "rules": [["model.*", INT8_TOKEN]]}).to_html()
    assert_expected_inline(
        fragment(page, '<details class="site"', '<div class="pair">'),
        """\
<details class="site" id="site-0" open><summary><code>model.<wbr>layers.<wbr>0.<wbr>linear_attn/<wbr>gdn#0</code> <span class="pill good">rewritten</span> <small>gdn &#183; delta rule, one decay a head &#183; loop</small> <a class="anchor" href="#site-0" title="link to this site">#</a></summary>
<dl><dt>source</dt><dd><code>my_layer.py:41</code></dd>
<dt>found</dt><dd>token by token: each step matched by algebra, the steps chained and re-rolled into one op (17 steps)</dd>
<dt>self-check</dt><dd><span class="pill good">agrees</span> original and rewrite in float64, largest error: values 3.1e-13, gradients 8.3e-12; real shapes; 0.024 s</dd>
<dt>roles</dt><dd><span class="role"><mark class="r-q">q</mark> <code>select_4</code></span> <span class="role"><mark class="r-k">k</mark> <code>view_1</code></span> <span class="role"><mark class="r-v">v</mark> <code>v</code></span> <span class="role"><mark class="r-g">g</mark> <code>view_2</code></span> <span class="role"><mark class="r-beta">beta</mark> <code>beta</code></span> <span class="role"><mark class="r-state">state</mark> <code>%state</code></span></dd>
<dt>shapes</dt><dd><span class="muted">B</span> 1 &nbsp; <span class="muted">T</span> 17 &nbsp; <span class="muted">H</span> 2 &nbsp; <span class="muted">HV</span> 2 &nbsp; <span class="muted">K</span> 16 &nbsp; <span class="muted">V</span> 16</dd>
<dt>state</dt><dd>4.0 KiB &#8594; 1.0 KiB per sequence</dd>
<dt>policy</dt><dd><span title="{&quot;state&quot;: {&quot;format&quot;: &quot;int8&quot;, &quot;block_v&quot;: 64, &quot;block_k&quot;: null}, &quot;write&quot;: {&quot;mode&quot;: &quot;token&quot;}, &quot;readout&quot;: &quot;before_write&quot;, &quot;rounding&quot;: &quot;nearest&quot;, &quot;seed&quot;: 0, &quot;feedback&quot;: null, &quot;rotation&quot;: null, &quot;gate&quot;: null, &quot;prefill&quot;: null, &quot;storage&quot;: &quot;emulated&quot;, &quot;kernel&quot;: &quot;auto&quot;}">int8/*x64 token</span> <small>recipe rule 0: <code>model.*</code></small></dd>
<dt>training</dt><dd>1 autograd node, 7 tensors saved for backward</dd>
<dt>taken as given</dt><dd><code>q, view_1, v, view_2, beta, state</code></dd>
<dt>other evidence</dt><dd><span class="role">chained_by <code>data flow</code></span></dd>
</dl><p class="change"><b>1,204</b> nodes &#8594; <b>1</b></p>
""",  # noqa: E501
    )


def test_the_subgraph_is_in_columns_with_the_roles_marked() -> None:
    assert_expected_inline(
        fragment(Report(sites=[spelled(0)]).to_html(), "<figure><figcaption>before", "</div></details>"),
        """\
<figure><figcaption>before</figcaption><div class="code"><pre style="counter-reset:line 0"><span class="gone"><mark class="r-q" title="q">select_4</mark>  <b>aten.select.int</b>(q, 1, 0)</span>
<span class="gone"><i>exp</i>       <b>aten.exp</b>(<mark class="r-g" title="g">view_2</mark>)</span>
<span class="gone"><i>mul</i>       <b>aten.mul.Tensor</b>(<mark class="r-state" title="state">state</mark>, exp)</span>
<span class="gone"><i>bmm</i>       <b>aten.bmm</b>(transpose, mul)</span>
<span class="gone"><i>sub</i>       <b>aten.sub.Tensor</b>(<mark class="r-v" title="v">v</mark>, bmm)</span>
<span class="gone"><i>mul_1</i>     <b>aten.mul.Tensor</b>(sub, <mark class="r-beta" title="beta">beta</mark>)</span>
<span class="gone"><i>baddbmm</i>   <b>aten.baddbmm</b>(mul, <mark class="r-k" title="k">view_1</mark>, mul_1)</span>
<span class="gone"><i>bmm_1</i>     <b>aten.bmm</b>(<mark class="r-q" title="q">select_4</mark>, baddbmm)</span>
<span class="gone"><i>_to_copy</i>  <b>aten._to_copy</b>(bmm_1, dtype=torch.bfloat16)</span></pre></div></figure>
<figure class="after"><figcaption>after</figcaption><div class="code"><pre style="counter-reset:line 0"><span class="new"><i>decode</i>  <b>lattn.decode</b>(<mark class="r-q" title="q">unsqueeze</mark>, <mark class="r-k" title="k">unsqueeze_1</mark>, <mark class="r-v" title="v">unsqueeze_2</mark>, <mark class="r-g" title="g">unsqueeze_3</mark>, <mark class="r-beta" title="beta">beta</mark>, <mark class="r-state" title="state">state</mark>, None, None, None, None, rule=delta, scale=1.0)</span></pre></div></figure>
""",  # noqa: E501
    )


def test_a_row_of_the_table_leads_to_the_site_and_to_the_reason() -> None:
    page = Report(sites=[spelled(0), left(1)]).to_html()
    assert_expected_inline(
        ascii_only("\n".join(re.findall("<tr><td>.*?</tr>", page)).replace("</td>", "</td>\n")),
        """\
<tr><td><a href="#site-0"><code>model.<wbr>layers.<wbr>0.<wbr>linear_attn/<wbr>gdn#0</code></a><small>my_layer.py:41</small></td>
<td><span class="pill good">rewritten</span></td>
<td>gdn<small>delta/<wbr>head</small></td>
<td>loop</td>
<td>1,17,2,2,<wbr>16,16</td>
<td>int8/*x64 token</td>
<td>lattn::decode<small>reference</small></td>
<td>4.0&nbsp;KiB &#8594; 1.0&nbsp;KiB<small>&#8722;75 %</small></td>
<td><span class="fixed">3.1e-13</span><small>gradients <span class="fixed">8.3e-12</span></small></td>
</tr>
<tr><td><a href="#site-1"><code>model.<wbr>layers.<wbr>1.<wbr>linear_attn/<wbr>gdn#0</code></a><small>modeling_qwen3_next.py:612</small></td>
<td><span class="pill warn">left</span><small><a href="#reason-DENSE_CACHE">DENSE_CACHE</a></small></td>
<td>gdn<small>delta/<wbr>head</small></td>
<td>call</td>
<td>1,s27,2,4,<wbr>16,16</td>
<td>int8/*x64 token</td>
<td>&#8211;</td>
<td>4.0&nbsp;KiB</td>
<td><span class="muted">&#8211;</span></td>
</tr>""",  # noqa: E501
    )


def test_a_candidate_says_how_far_it_came_and_what_to_do() -> None:
    page = Report(unmatched=[candidate(0), candidate(1)]).to_html()
    assert_expected_inline(
        fragment(page, "<h2>Not recognised", "</section>"),
        """\
<h2>Not recognised</h2><article id="candidate-0"><h3><code>model.<wbr>layers.<wbr>[0-1].<wbr>mixer</code> <a class="pill warn" href="#reason-KEYS">KEYS</a></h3><dl><dt>node</dt><dd><code>add_0, add_1</code></dd>
<dt>source</dt><dd><code>mixer.py:88</code></dd>
<dt>how far it came</dt><dd>erase and read use different keys</dd>
<dt>why it stopped</dt><dd>the two keys are not one value</dd>
<dt>what to do</dt><dd>Use one key for both.</dd>
</dl></article>""",  # noqa: E501
    )


def test_a_reason_code_is_explained_on_the_page() -> None:
    page = Report(sites=[left(0, reason("NO_RULE"))]).to_html()
    article = fragment(page, '<article id="reason-NO_RULE"', "</article>")
    parse(page)
    for text in (REASONS["NO_RULE"].text, EXAMPLES["NO_RULE"], "lc.attach(model, recipe) gives them in full."):
        assert escape(text) in article
    assert '<a href="#site-0">' in article


def test_nodes_that_the_evidence_does_not_count_are_counted_in_the_text() -> None:
    evidence = {"found_by": "algebra", "nodes_before": 1204}
    after = f"# a comment\n{spelled(0).graph_after}\n... 3 more nodes ...\n"
    page = Report(sites=[spelled(0, evidence=evidence, graph_after=after)]).to_html()
    assert "<b>1,204</b> nodes → <b>4</b>" in page
    assert 'class="change"' not in Report(sites=[spelled(0, evidence=evidence, graph_after=None)]).to_html()
    assert 'class="change"' not in Report(sites=[site(0)]).to_html()


def long_graph(layer: int) -> str:
    return "\n".join(
        f"%mul_{n} : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%a, 2), kwargs = {{}})"
        for n in range(900 * layer, 900 * layer + 1000)
    )


def test_the_middle_of_a_long_subgraph_is_folded_away() -> None:
    page = Report(sites=[spelled(0, graph_before=long_graph(0))]).to_html()
    parse(page)
    before = fragment(page, "<figure><figcaption>before", '<figure class="after">')
    head, middle, tail = re.split("<details>|</details>", before)
    assert "<summary>976 more nodes</summary>" in middle
    for n, part in ((0, head), (15, head), (16, middle), (991, middle), (992, tail), (999, tail)):
        assert f"<i>mul_{n}</i>" in part
    assert "counter-reset:line 992" in tail  # line numbers go on


def test_line_numbers_count_the_nodes_that_a_cut_text_left_out() -> None:
    lines = long_graph(0).splitlines()
    text = "\n".join(["# in forward", *lines[:200], "... 600 more nodes ...", *lines[800:]])
    page = Report(sites=[spelled(0, graph_before=text)]).to_html()
    parse(page)
    before = fragment(page, "<figure><figcaption>before", '<figure class="after">')
    _, middle, tail = re.split("<details>|</details>", before)
    assert '<span class="note" style="counter-increment:line 0"># in forward</span>' in before
    assert f"<summary>{1000 - 15 - 8} more nodes</summary>" in middle and "counter-reset:line 15" in middle
    assert '<span class="note" style="counter-increment:line 600">... 600 more nodes ...</span>' in middle
    assert "counter-reset:line 992" in tail and "<i>mul_992</i>" in tail


def test_long_subgraphs_of_equal_layers_are_shown_once() -> None:
    sites = [spelled(n, graph_before=long_graph(n)) for n in range(3)]
    page = Report(sites=sites).to_html()
    assert page.count("more nodes</summary>") == 1
    assert page.count('The subgraphs are those of <a href="#site-0">') == 2
    other = spelled(2, graph_before=long_graph(2).replace("aten.mul", "aten.add"))
    assert Report(sites=[*sites[:2], other]).to_html().count("more nodes</summary>") == 2


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({}, None),
        ({"found_by": "algebra"}, "not checked"),
        ({"found_by": "algebra", "self_check": None}, "not checked"),
        ({"found_by": "algebra", "self_check": {"verified": False, "skipped": True}}, "not checked"),
        ({"found_by": "hypothesis", "self_check": {"verified": False, "max_error": 0.25}}, "failed"),
        ({"found_by": "algebra", "self_check": {"verified": True, "max_gradient_error": None}}, "agrees"),
        ({"self_check": {"verified": True, "max_relative_error": {"value": 1e-13}, "gradients": "not run"}}, "agrees"),
        ({"self_check": {"verified": True, "max_error": 0.0, "seconds": 1, "cached": True}}, "agrees"),
        ({"found_by": 3, "roles": [1], "self_check": "yes", "frontier": "q", "nodes_before": "many"}, "not checked"),
    ],
)
def test_evidence_may_miss_any_key(evidence: dict[str, Any], said: str | None) -> None:
    page = Report(sites=[spelled(0, evidence=evidence)]).to_html()
    parse(page)
    found = re.search('<dt>self-check</dt><dd><span class="pill [a-z]+">(.*?)</span>', page)
    assert (found and found[1]) == said


def test_the_sides_are_read_from_generated_python_too() -> None:
    before = """\
# File: my_layer.py:41 in forward, code: S = S * g.exp()
exp: "f32[1, 2]" = torch.ops.aten.exp.default(g_1);  g_1 = None
mul: "f32[1, 2, 4, 4]" = torch.ops.aten.mul.Tensor(S_1, exp);  S_1 = exp = None
"""
    page = Report(sites=[spelled(0, graph_before=before, evidence={"roles": {"g": "exp"}})]).to_html()
    assert_expected_inline(
        fragment(page, "<figure><figcaption>before", '<figure class="after">'),
        """\
<figure><figcaption>before</figcaption><div class="code"><pre style="counter-reset:line 0"><span class="note" style="counter-increment:line 0"># File: my_layer.py:41 in forward, code: S = S * g.exp()</span>
<span class="gone"><mark class="r-g" title="g">exp</mark>  f32[1, 2]        <b>aten.exp</b>(g_1)</span>
<span class="gone"><i>mul</i>  f32[1, 2, 4, 4]  <b>aten.mul.Tensor</b>(S_1, <mark class="r-g" title="g">exp</mark>)</span></pre></div></figure>
""",  # noqa: E501
    )
