from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from lattn_compile.errors import FileFormatError, LattnError, reason
from lattn_compile.report import SCHEMA_VERSION, Report, Site, Unmatched
from tests.render.samples import full_report, left, site


def test_json_round_trip_keeps_everything() -> None:
    report = full_report()
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json(indent=None)) == report


def test_json_names_its_schema_and_version() -> None:
    data = json.loads(full_report().to_json())
    assert (data["schema"], data["version"]) == ("lattn-compile/report", SCHEMA_VERSION)
    assert list(data) == [
        "schema",
        "version",
        "sites",
        "unmatched",
        "graph_breaks",
        "skipped_frames",
        "compiles",
        "seconds",
        "recipe",
        "notes",
    ]
    assert data["sites"][3]["reason"]["code"] == "DENSE_CACHE"


def test_evidence_that_json_cannot_say_becomes_text_at_once() -> None:
    one = site(0, evidence={"error": float("nan"), "worst": float("inf"), "dtype": torch.bfloat16, "axes": (0, 1)})
    assert one.evidence == {"error": "nan", "worst": "inf", "dtype": "torch.bfloat16", "axes": [0, 1]}
    report = Report(sites=[one])
    assert Report.from_json(report.to_json()) == report


def test_a_symbolic_size_is_named_and_never_specialised() -> None:
    class Size:
        def __int__(self) -> int:
            raise AssertionError("specialised")

        __index__ = __int__

        def __str__(self) -> str:
            return "s27"

    assert site(0, shapes={"T": Size(), "K": 16}).shapes == {"T": "s27", "K": 16}


def test_a_report_can_be_pickled() -> None:
    report = full_report()
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other"}, "got 'other'; want schema 'lattn-compile/report'"),
        ({"version": SCHEMA_VERSION + 1}, f"got version {SCHEMA_VERSION + 1}; want a version from 1 to"),
        ({"version": "1"}, "got version '1'"),
        ({"graph_brakes": []}, "Did you mean 'graph_breaks'?"),
        ({"sites": [{**site(0).to_dict(), "kernl": 1}]}, "Site with key 'kernl'"),
        ({"sites": [{"path": "a"}]}, "Site without decay, form, id, kind, rule, verdict"),
        ({"sites": [{**left(0).to_dict(), "reason": {"code": "X"}}]}, "Reason without remedy, text"),
        ({"sites": [3]}, "got 3; want an object for a Site"),
        ({"sites": [{**site(0).to_dict(), "decay": "chanel"}]}, "Did you mean 'channel'?"),
    ],
)
def test_a_report_that_is_not_one_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LattnError) as error:
        Report.from_dict({**full_report().to_dict(), **change})
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "not json", "[]", "3"])
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(FileFormatError, match=r"Report\.to_json"):
        Report.from_json(text)


@pytest.mark.parametrize("field", ["rule", "decay", "form", "verdict"])
def test_a_site_refuses_words_outside_its_vocabulary(field: str) -> None:
    with pytest.raises(LattnError, match=rf"Site\.{field}: got 'something'"):
        site(0, **{field: "something"})


def test_a_left_site_has_a_reason_and_a_rewritten_one_has_none() -> None:
    with pytest.raises(LattnError, match=r"Site\.reason"):
        site(0, verdict="left")
    with pytest.raises(LattnError, match=r"Site\.reason"):
        site(0, reason=reason("NO_RULE"))


def test_merging_counts_a_recompiled_site_once_and_adds_up_the_cost() -> None:
    first = Report(sites=[site(0)], compiles=1, seconds=2.0, graph_breaks=["a"], notes=["n"], recipe={"version": 1})
    again = Report(sites=[site(0)], compiles=1, seconds=3.0, graph_breaks=["a"], notes=["n"], recipe={"version": 1})
    merged = Report.merge([first, again])
    assert merged == Report(
        sites=[site(0)], compiles=2, seconds=5.0, graph_breaks=["a", "a"], notes=["n"], recipe={"version": 1}
    )
    assert first.compiles == 1 and first.graph_breaks == ["a"]


def test_merging_keeps_prefill_and_decode_of_one_layer_apart() -> None:
    merged = Report.merge([Report(sites=[site(0)]), Report(sites=[site(0, op="lattn::decode")])])
    assert [s.op for s in merged.sites] == ["lattn::chunk", "lattn::decode"]


def test_merging_two_recipes_claims_neither() -> None:
    merged = Report.merge([Report(recipe={"version": 1, "rules": []}), Report(recipe={"version": 1})])
    assert merged.recipe is None
    assert merged.notes == ["merged from compiles under 2 different recipes"]


def test_merging_nothing_is_an_empty_report() -> None:
    assert Report.merge([]) == Report()


def test_what_the_recipe_itself_leaves_does_not_count_as_left_though_asked() -> None:
    quiet = [left(0, reason("RULE_NONE")), left(1, reason("NO_RULE"))]
    assert Report(sites=quiet).left_though_asked == []
    report = full_report()
    assert report.left_though_asked == [report.sites[3], report.unmatched[0]]
    assert (len(report.rewritten), len(report.left)) == (3, 1)


def test_print_shows_the_table_and_summary_is_one_line() -> None:
    report = full_report()
    assert str(report).splitlines()[0] == report.summary()
    assert "model.layers.[0-2].linear_attn/gdn#0" in str(report)


def test_records_are_frozen() -> None:
    for record in (site(0), Unmatched(path="a", node="b", stopped_at="c", reason=reason("NO_RULE"))):
        with pytest.raises(AttributeError):
            record.path = "other"  # type: ignore[misc]
    assert isinstance(Site.from_dict(site(0).to_dict()), Site)


def test_reports_and_the_command_line_load_without_triton_transformers_and_rich() -> None:
    code = """
import sys
for name in ("triton", "transformers", "fla", "rich"):
    sys.modules[name] = None
import lattn_compile.cli
from lattn_compile.report import Report
print(Report().summary())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "lattn-compile: no linear-attention recurrence found\n"), run.stderr
