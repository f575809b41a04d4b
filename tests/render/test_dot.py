from __future__ import annotations

import re

from expecttest import assert_expected_inline

from lattn_compile.report import Report
from tests.render.samples import candidate, full_report, left, site, spelled


def test_a_module_tree_ends_in_its_sites() -> None:
    assert_expected_inline(
        Report(sites=[site(0), left(1)]).to_dot(),
        """\
digraph lattn_compile {
  label="lattn-compile: 1 of 2 sites rewritten (gdn 1), 1 left (DENSE_CACHE 1)\\lstate 8.0 KiB -> 5.0 KiB per sequence once packed (storage is emulated)\\l\\l"; labelloc=t; rankdir=LR;
  fontname="Helvetica"; fontsize=11;
  node [shape=box, fontname="Helvetica", fontsize=10]; edge [arrowhead=none, color="#8a8f98"];
  "module model" [label="model"];
  "module model.layers" [label="layers"];
  "module model" -> "module model.layers";
  "module model.layers.0" [label="0"];
  "module model.layers" -> "module model.layers.0";
  "module model.layers.0.linear_attn" [label="linear_attn"];
  "module model.layers.0" -> "module model.layers.0.linear_attn";
  "site 0" [label="gdn  delta/head  call\\lB,T,H,HV,K,V = 1,s27,2,4,16,16\\llattn::chunk  int8/*x64 token\\lstate 4.0 KiB -> 1.0 KiB\\l", tooltip="model.layers.0.linear_attn/gdn#0", style="filled,rounded", fillcolor="#d9f2e3", color="#1a7f4b"];
  "module model.layers.0.linear_attn" -> "site 0";
  "module model.layers.1" [label="1"];
  "module model.layers" -> "module model.layers.1";
  "module model.layers.1.linear_attn" [label="linear_attn"];
  "module model.layers.1" -> "module model.layers.1.linear_attn";
  "site 1" [label="gdn  delta/head  call\\lB,T,H,HV,K,V = 1,s27,2,4,16,16\\lleft: DENSE_CACHE\\lstate 4.0 KiB\\l", tooltip="model.layers.1.linear_attn/gdn#0", style="filled,rounded", fillcolor="#fdeccf", color="#a8690a"];
  "module model.layers.1.linear_attn" -> "site 1";
}
""",  # noqa: E501
    )


def test_unmatched_candidates_are_dashed() -> None:
    dot = full_report().to_dot()
    assert 'label="not recognised: add_12 at mixer.py:88\\lerase and read use different keys\\lKEYS\\l"' in dot
    assert 'tooltip="Use one key for both.", style="dashed,rounded"' in dot
    assert '"module model.layers.5.mixer" -> "unmatched 0";' in dot


def test_a_candidate_without_a_path_hangs_from_the_root() -> None:
    dot = Report(unmatched=[candidate(0, path="", source=None, stopped_at="a long way of words " * 6)]).to_dot()
    assert '"module (root)" -> "unmatched 0";' in dot
    label = re.search(r'"unmatched 0" \[label="(.*?)"', dot)
    assert label is not None and max(map(len, label[1].split("\\l"))) <= 60


def test_a_spelled_out_site_says_how_many_nodes_it_replaced() -> None:
    assert "lattn::decode  int8/*x64 token\\lstate 4.0 KiB -> 1.0 KiB\\l1,204 nodes -> 1\\l" in (
        Report(sites=[spelled(0)]).to_dot()
    )


def test_quotes_and_backslashes_in_names_stay_inside_their_string() -> None:
    dot = Report(sites=[site(0, path='a."b\\', id='a."b\\/gdn#0')]).to_dot()
    for line in dot.splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line
