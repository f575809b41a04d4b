from __future__ import annotations

import json

from expecttest import assert_expected_inline

from lattn_compile.report import Report
from tests.render.samples import candidate, left, spelled


def test_a_report_as_json_reads_as_documented() -> None:
    short = {"graph_before": "before", "graph_after": "after", "policy": {"write": {"mode": "token"}}}
    report = Report(sites=[spelled(0, **short), left(1)], unmatched=[candidate(2)], compiles=1, seconds=0.5)
    data = json.loads(report.to_json())
    del data["sites"][1:]
    assert_expected_inline(
        json.dumps(data, indent=1),
        """\
{
 "schema": "lattn-compile/report",
 "version": 1,
 "sites": [
  {
   "path": "model.layers.0.linear_attn",
   "id": "model.layers.0.linear_attn/gdn#0",
   "kind": "gdn",
   "rule": "delta",
   "decay": "head",
   "form": "loop",
   "verdict": "rewritten",
   "call": null,
   "shapes": {
    "B": 1,
    "T": 17,
    "H": 2,
    "HV": 2,
    "K": 16,
    "V": 16
   },
   "policy": {
    "write": {
     "mode": "token"
    }
   },
   "op": "lattn::decode",
   "kernel": "reference",
   "state_bytes_before": 4096,
   "state_bytes_after": 1040,
   "source": "my_layer.py:41",
   "reason": null,
   "evidence": {
    "found_by": "algebra",
    "form": "loop",
    "steps": 17,
    "roles": {
     "q": "select_4",
     "k": "view_1",
     "v": "v",
     "g": "view_2",
     "beta": "beta",
     "state": "%state"
    },
    "nodes_before": 1204,
    "nodes_after": 1,
    "self_check": {
     "verified": true,
     "max_error": 3.1e-13,
     "max_gradient_error": 8.25e-12,
     "shapes": "real",
     "seconds": 0.024,
     "cached": false
    },
    "frontier": [
     "q",
     "view_1",
     "v",
     "view_2",
     "beta",
     "state"
    ],
    "rule_index": 0,
    "captured": null,
    "chained_by": "data flow"
   },
   "folded": [],
   "autograd_nodes": 1,
   "residual_count": 7,
   "graph_before": "before",
   "graph_after": "after"
  }
 ],
 "unmatched": [
  {
   "path": "model.layers.2.mixer",
   "node": "add_2",
   "stopped_at": "erase and read use different keys",
   "reason": {
    "code": "KEYS",
    "text": "the two keys are not one value",
    "remedy": "Use one key for both."
   },
   "source": "mixer.py:88",
   "evidence": {}
  }
 ],
 "graph_breaks": [],
 "skipped_frames": [],
 "compiles": 1,
 "seconds": 0.5,
 "recipe": null,
 "notes": []
}""",
    )
    assert Report.from_json(report.to_json()) == report
