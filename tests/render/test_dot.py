from __future__ import annotations

import re

from expecttest import assert_expected_inline

from lattn_compile.report import Report
from tests.render.samples import full_report, left, site


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
    assert 'label="not recognised: add_12\\lerase and read use different keys\\lKEYS\\l", style="dashed' in (
        full_report().to_dot()
    )


def test_quotes_and_backslashes_in_names_stay_inside_their_string() -> None:
    dot = Report(sites=[site(0, path='a."b\\', id='a."b\\/gdn#0')]).to_dot()
    for line in dot.splitlines():
        assert len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0, line
