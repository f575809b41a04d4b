from __future__ import annotations

from typing import Any

import pytest
from expecttest import assert_expected_inline

from lattn_compile.errors import REASONS, Reason, reason
from lattn_compile.render import render_table, summary_line
from lattn_compile.render.labels import fold_sites, policy_label, size_label
from lattn_compile.report import FORMS, Report, Site, Unmatched
from tests.render.samples import INT8_TOKEN, candidate, full_report, left, site, spelled


def test_a_full_report_reads_as_summary_table_and_sentences() -> None:
    assert_expected_inline(
        render_table(full_report().to_dict()),
        """\
lattn-compile: 3 of 4 sites rewritten (gdn 3), 1 left (DENSE_CACHE 1); 1 unrecognised candidate; state 16.0 KiB -> 7.0 KiB per sequence once packed (storage is emulated); 2 compiles in 12.3 s, 1 graph break; WARNING: Dynamo skipped 1 frame, which run uncompiled

site                                  n  kind  rule/decay  form  B,T,H,HV,K,V     policy           op            kernel     state per sequence  verdict
------------------------------------  -  ----  ----------  ----  ---------------  ---------------  ------------  ---------  ------------------  ----------------
model.layers.[0-2].linear_attn/gdn#0  3  gdn   delta/head  call  1,s27,2,4,16,16  int8/*x64 token  lattn::chunk  reference  4.0 KiB -> 1.0 KiB  rewritten
model.layers.4.linear_attn/gdn#0      1  gdn   delta/head  call  1,s27,2,4,16,16  int8/*x64 token  -             -          4.0 KiB             left DENSE_CACHE

left: model.layers.4.linear_attn/gdn#0 at modeling_qwen3_next.py:612: [DENSE_CACHE] a dense cached state is handed over at every call, which is harmless only for exact and for token writes with nearest rounding and no feedback. For training, call the model with use_cache=False; for cached inference use a token policy, or carry the EncodedState or ReplayState of lc.linear_attention.
unrecognised: model.layers.5.mixer, node add_12 at mixer.py:88: [KEYS] erase and read use different keys
remedy: [KEYS] the two keys are not one value. Use one key for both.
graph break: app.py:31: call to print
skipped frame: forward (app.py:12): generator
note: autocast inside the region: rewritten without normalisation""",  # noqa: E501
    )


def left_spelled(**changes: Any) -> Site:
    return spelled(0, verdict="left", reason=reason("RULE_NONE"), op=None, kernel=None, **changes)


def test_an_empty_report_says_that_nothing_was_found() -> None:
    assert_expected_inline(
        render_table(Report(compiles=1, seconds=0.25).to_dict()),
        """lattn-compile: no linear-attention recurrence found; 1 compile in 0.2 s, 0 graph breaks""",
    )


def test_a_layer_in_two_forms_counts_once_in_the_summary() -> None:
    report = Report(sites=[site(0), site(0, op="lattn::decode")])
    assert summary_line(report.to_dict()).startswith("lattn-compile: 1 of 1 site rewritten (gdn 1); state 4.0 KiB -> ")


def test_a_layer_left_in_one_form_counts_as_left() -> None:
    line = summary_line(Report(sites=[site(0), left(0)]).to_dict())
    assert line.startswith("lattn-compile: 0 of 1 site rewritten, 1 left (DENSE_CACHE 1)")


def test_a_skipped_frame_is_loud_in_the_summary() -> None:
    assert "WARNING: Dynamo skipped 1 frame" in summary_line(full_report().to_dict())


def test_a_saving_that_is_only_emulated_is_not_called_a_saving() -> None:
    packed = site(0, policy={**INT8_TOKEN, "storage": "packed"})
    assert "once packed" in summary_line(Report(sites=[site(0)]).to_dict())
    assert "once packed" not in summary_line(Report(sites=[packed]).to_dict())


def test_layers_that_differ_in_more_than_their_number_are_not_folded() -> None:
    sites = [site(0), site(1, op="lattn::decode"), site(2)]
    labels = [label for label, _ in fold_sites([s.to_dict() for s in sites], lambda s: s["op"])]
    assert labels == ["model.layers.[0,2].linear_attn/gdn#0", "model.layers.1.linear_attn/gdn#0"]


def test_layers_of_a_sequential_are_folded_too() -> None:
    sites = [site(0, path=f"{n}", id=f"{n}/gdn#0").to_dict() for n in (0, 1, 3)]
    assert [label for label, _ in fold_sites(sites, lambda s: None)] == ["[0-1,3]/gdn#0"]


def test_a_site_outside_numbered_layers_keeps_its_id() -> None:
    root = site(0, path="mamba2", id="mamba2/gdn#0")
    assert fold_sites([root.to_dict()], lambda s: None)[0][0] == "mamba2/gdn#0"


def test_reasons_with_different_details_are_listed_apart() -> None:
    report = Report(sites=[left(0), left(1, reason("DENSE_CACHE", "layer 1"))])
    assert render_table(report.to_dict()).count("\nleft: ") == 2


def test_what_happened_again_is_one_line_with_a_count() -> None:
    text = render_table(Report(graph_breaks=["a.py:3: print"] * 3, compiles=1).to_dict())
    assert "3 graph breaks" in text
    assert text.count("graph break: ") == 1
    assert text.endswith("graph break: a.py:3: print (3 times)")


def test_a_candidate_without_a_path_is_named_by_its_node() -> None:
    why = reason("CALL_OPTIONS", "fla.ops.f: head_first")
    unmatched = Unmatched(path="", node="fla.ops.f", stopped_at="the call's arguments", reason=why)
    assert (
        "\nunrecognised: node fla.ops.f: [CALL_OPTIONS] the call's arguments; fla.ops.f: head_first\n"
        f"remedy: [CALL_OPTIONS] {REASONS['CALL_OPTIONS'].text}. {REASONS['CALL_OPTIONS'].remedy}"
    ) in render_table(Report(unmatched=[unmatched]).to_dict())


@pytest.mark.parametrize("form", FORMS)
def test_the_form_column_says_how_the_graph_spelled_it(form: str) -> None:
    header, _, row = render_table(Report(sites=[spelled(0, form=form)]).to_dict()).splitlines()[2:5]
    at = header.index("form")
    assert row[at:].split()[0] == form


def test_a_layer_that_prefills_by_chunk_and_decodes_by_step_has_a_row_each() -> None:
    sites = [spelled(n, form=form) for n in (0, 1) for form in ("chunk", "step")]
    text = render_table(Report(sites=sites).to_dict())
    assert text.count("model.layers.[0-1].linear_attn/gdn#0  2") == 2
    assert "2 of 2 sites rewritten" in text


def test_candidates_are_a_line_each_and_a_remedy_a_code() -> None:
    squashed = Reason(code="NONLINEAR", text="a nonlinearity on the state path", remedy="Keep the state linear.")
    report = Report(
        unmatched=[
            candidate(0, node="add_3"),
            candidate(1, node="add_41"),
            candidate(3, source="mixer.py:91"),
            candidate(4, path="", node="tanh", source=None, reason=squashed, stopped_at="tanh of the updated state"),
        ]
    )
    assert_expected_inline(
        render_table(report.to_dict()),
        """\
lattn-compile: no linear-attention recurrence found; 4 unrecognised candidates

unrecognised: model.layers.[0-1].mixer, node add_3 and 1 alike at mixer.py:88: [KEYS] erase and read use different keys
unrecognised: model.layers.3.mixer, node add_3 at mixer.py:91: [KEYS] erase and read use different keys
unrecognised: node tanh: [NONLINEAR] tanh of the updated state
remedy: [KEYS] the two keys are not one value. Use one key for both.
remedy: [NONLINEAR] a nonlinearity on the state path. Keep the state linear.""",
    )


def test_the_self_check_is_one_line() -> None:
    def last(*sites: Site) -> str:
        return render_table(Report(sites=list(sites)).to_dict()).splitlines()[-1]

    assert last(spelled(0), spelled(1), spelled(2)) == ("self-check: 3 sites (2 cached), 0.07 s, largest error 8.3e-12")
    unchecked = {**spelled(1).evidence, "self_check": None}
    assert last(spelled(0), spelled(1, evidence=unchecked)) == (
        "self-check: 1 site, 0.02 s, largest error 8.3e-12; 1 spelled-out site not checked"
    )
    failed = {"found_by": "hypothesis", "self_check": {"verified": False, "max_error": float("nan"), "seconds": 2}}
    assert last(left_spelled(evidence=failed)) == "self-check: 1 site, 2.00 s, largest error nan; 1 site FAILED"
    assert not last(site(0)).startswith("self-check")


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (None, "-"),
        (INT8_TOKEN, "int8/*x64 token"),
        ({"state": {"format": "fp32"}, "write": {"mode": "exact"}}, "exact"),
        ({"state": {"format": "nvfp4"}, "write": {"mode": "replay", "window": 16}}, "nvfp4 replay(window=16)"),
        ({**INT8_TOKEN, "rounding": "stochastic", "seed": 3}, "int8/*x64 token rounding=stochastic seed=3"),
        (
            {
                "state": {"format": "fp8_e4m3", "block_k": 32, "block_v": 64},
                "write": {
                    "mode": "two_precision",
                    "window": 16,
                    "read": {"format": "fp8_e4m3", "block_k": 128, "block_v": 1},
                },
            },
            "fp8_e4m3/32x64 two_precision(window=16,read=fp8_e4m3/128x1)",
        ),
    ],
)
def test_a_policy_is_named_by_format_mode_and_what_is_unusual(policy: dict | None, label: str) -> None:
    assert policy_label(policy) == label


@pytest.mark.parametrize(
    ("nbytes", "label"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (17 * 2**20, "17.0 MiB"), (2**50, "1024.0 TiB")],
)
def test_sizes_are_in_binary_units(nbytes: int | None, label: str) -> None:
    assert size_label(nbytes) == label
