"""Model Optimizer dictionaries read as recipes: what is carried over, what is named, what is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from lattn_compile.errors import LattnError, LattnWarning, RecipeError
from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.policy import Chunk, Exact, Neumann, Policy, Prefill, Recipe, Replay, TwoPrecision

GDN, KDA = "model.layers.3.linear_attn/gdn#0", "model.layers.3.self_attn/kda#0"
OFF = {"quantizer_name": "*", "enable": False}
INT8 = {"num_bits": 8, "unsigned": False, "narrow_range": True, "type": "dynamic", "axis": [0, 1]}
FP8 = {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1), "pass_through_bwd": True}
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
TOKEN = {"mode": "token", "readout": "working"}
REPLAY = {"mode": "replay", "readout": "working", "replay": {"window": 8, "factor_qdq": False, "encoding": "once"}}


def config(*quantizers: Any, decode: Any = TOKEN, **cfg: Any) -> dict[str, Any]:
    entries = [{"quantizer_name": q[0], "cfg": q[1]} if isinstance(q, tuple) else q for q in quantizers]
    policy = {"backend": "matmul", "state": {"block_v": 64}, "decode": decode, **cfg}
    return {
        "quant_cfg": [OFF, *entries],
        "algorithm": None,
        "linear_attention": [{"module_name": "*", "cfg": policy}],
    }


def read(cfg: Any) -> Recipe:
    """The recipe, where nothing at all may be left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Recipe.from_modelopt(cfg)


def policy_of(cfg: Any, site: str = GDN) -> Policy | None:
    return read(cfg).resolve(site)[1]


def error_of(cfg: Any) -> LattnError:
    with pytest.raises(LattnError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Recipe.from_modelopt(cfg)
    return caught.value


def warning_of(cfg: Any) -> str:
    with pytest.warns(LattnWarning) as caught:
        Recipe.from_modelopt(cfg)
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


@pytest.mark.parametrize(
    ("quantizer", "decode", "want"),
    [
        (INT8, TOKEN, Policy(Int8(64))),
        (FP8, TOKEN, Policy(Fp8(64))),
        (FP8, {**TOKEN, "readout": "stored"}, Policy(Fp8(64), readout="after_write")),
        (INT8, {**TOKEN, "implementation": "torch"}, Policy(Int8(), kernel="reference")),
        (INT8, {**TOKEN, "implementation": "triton"}, Policy(Int8(), kernel="triton")),
        (INT8, REPLAY, Policy(Int8(), write=Replay(8))),
        (FP8, None, Policy(Fp8(), write=Chunk(64))),
        ({**INT8, "axis": None, "block_sizes": {-1: 32}}, TOKEN, Policy(Int8(32, block_k=1))),
        ({**INT8, "axis": None, "block_sizes": {"-1": 32, "-2": 128}}, TOKEN, Policy(Int8(32, block_k=128))),
        ({**INT8, "axis": None, "block_sizes": {-1: None}}, TOKEN, Policy(Int8(None, block_k=1))),
        ({**INT8, "narrow_range": False, "calibrator": "max", "rotate": {"enable": False}}, TOKEN, Policy(Int8())),
    ],
)
def test_formats_and_schedules_are_carried_over(quantizer: Any, decode: Any, want: Policy) -> None:
    assert read(config(("*gdn_state_quantizer", quantizer), decode=decode)).resolve(GDN) == (0, want)


def test_the_tile_of_the_state_is_carried_over() -> None:
    assert policy_of(config(("*gdn_state_quantizer", INT8), state={"block_v": 16})) == Policy(Int8(16))


def test_an_approximate_inverse_is_carried_over() -> None:
    cfg = config(("*gdn_state_quantizer", INT8), solve={"method": "neumann", "degree": 15, "implementation": "triton"})
    assert policy_of(cfg) == Policy(Int8(), prefill=Prefill(inverse=Neumann(15)))


def test_a_read_quantizer_gives_two_precisions() -> None:
    cfg = config(("*gdn_read_quantizer", FP8), decode={**REPLAY, "replay": {"window": 16, "factor_qdq": False}})
    assert policy_of(cfg) == Policy(write=TwoPrecision(16, read=Fp8(64)))
    assert error_of(config(("*gdn_read_quantizer", FP8))).argument == "gdn_read_quantizer"
    both = config(("*gdn_read_quantizer", FP8), ("*gdn_state_quantizer", FP8), decode=REPLAY)
    assert error_of(both).argument == "gdn_read_quantizer"


def test_an_explicit_policy_without_quantizers_is_the_exact_control() -> None:
    cfg = config()
    assert isinstance((policy_of(cfg) or Policy()).write, Exact)


def test_both_kinds_alike_make_one_rule_and_one_kind_alone_its_own() -> None:
    both = read(config(("*gdn_state_quantizer", INT8), ("*kda_state_quantizer", INT8)))
    assert both == Recipe([("*", Policy(Int8()))]) == read(config(("*state_quantizer", INT8)))
    one = read(config(("*kda_state_quantizer", INT8)))
    assert one == Recipe([("*/kda#*", Policy(Int8()))])
    assert (one.resolve(KDA)[1], one.resolve(GDN)) == (Policy(Int8()), (None, None))
    each = read(config(("*gdn_state_quantizer", INT8), ("*kda_state_quantizer", FP8)))
    assert (each.resolve(GDN)[1], each.resolve(KDA)[1]) == (Policy(Int8()), Policy(Fp8()))


def test_the_last_entry_wins_there_so_the_first_rule_does_here() -> None:
    cfg = config(("*gdn_state_quantizer", FP8), ("*gdn_state_quantizer", INT8))
    assert policy_of(cfg) == Policy(Int8())
    cfg["quant_cfg"].append({"quantizer_name": "*", "enable": False})
    cfg["quant_cfg"].append({"quantizer_name": "*gdn_state_quantizer", "enable": True})
    assert policy_of(cfg) == Policy(Int8()), "a switch alone keeps the attributes"
    off = config({"quantizer_name": "*gdn_state_quantizer", "cfg": FP8, "enable": False}, ("*kda_state_quantizer", FP8))
    assert read(off) == Recipe([("*/kda#*", Policy(Fp8()))]), "attributes alone do not switch on"
    cfg["linear_attention"].append(
        {"module_name": "model.layers.3.*", "cfg": {"backend": "matmul", "decode": {**TOKEN, "readout": "stored"}}}
    )
    recipe = read(cfg)
    assert recipe.resolve(GDN)[1] == Policy(Int8(), readout="after_write")
    assert recipe.resolve("model.layers.4.linear_attn/gdn#0")[1] == Policy(Int8())


def test_entries_by_path_meet_modules_by_path() -> None:
    cfg = config(
        ("*gdn_state_quantizer", INT8),
        ("model.layers.3.linear_attn.gdn_state_quantizer", FP8),
        {"quantizer_name": "model.layers.4.linear_attn.gdn_state_quantizer", "enable": False},
    )
    cfg["linear_attention"][0]["module_name"] = "model.layers.*.linear_attn"
    recipe = read(cfg)

    def write_of(layer: str) -> Policy | None:
        return recipe.resolve(f"model.layers.{layer}.linear_attn/gdn#0")[1]

    assert (write_of("2"), write_of("3")) == (Policy(Int8()), Policy(Fp8()))
    assert isinstance((write_of("4") or Policy()).write, Exact)
    assert recipe.resolve("encoder.0/gdn#0") == (None, None)


def test_the_older_dictionary_form_is_read_alike() -> None:
    cfg = config()
    cfg["quant_cfg"] = {"default": {"enable": False}, "*gdn_state_quantizer": {**INT8, "enable": True}}
    assert policy_of(cfg) == Policy(Int8())


def test_the_flat_form_is_read_alike() -> None:
    cfg = config(("*state_quantizer", {**INT8, "axis": None, "block_sizes": {-1: 32}}))
    cfg["linear_attention"] = [{"module_name": "*", "cfg": {"backend": "serving", "precision": "vllm_0_15"}}]
    assert "vllm_0_15" in warning_of(cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Recipe.from_modelopt(cfg) == Recipe([("*", Policy(Int8(32, block_k=1)))])
        cfg["linear_attention"][0]["cfg"]["precision"] = "replayssm"
    assert error_of(cfg).argument.endswith(".precision")


def test_a_whole_recipe_file_and_a_pydantic_model_are_read_alike() -> None:
    cfg = config(("*state_quantizer", INT8))

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return cfg

    assert read({"metadata": {}, "quantize": cfg}) == read(Model()) == read(cfg)


def test_the_input_is_not_changed() -> None:
    cfg = config(("*state_quantizer", INT8), decode=REPLAY)
    before = copy.deepcopy(cfg)
    read(cfg)
    assert cfg == before


def test_what_is_outside_the_recurrence_is_named_in_one_warning() -> None:
    cfg = config(("*weight_quantizer", {"num_bits": 4}), {"quantizer_name": "*lm_head*", "enable": False})
    cfg["quant_cfg"].append({"quantizer_name": "*gdn_state_quantizer", "cfg": INT8})
    cfg["algorithm"] = "awq_lite"
    assert_expected_inline(
        warning_of(cfg),
        """\
Recipe.from_modelopt does not carry over: algorithm='awq_lite' (state scales are dynamic: there is nothing to \
calibrate); quant_cfg['*weight_quantizer'] (not a recurrence's state); quant_cfg['*lm_head*'] (by path: add a rule \
of your own if it means a recurrence).""",
    )


def test_defaults_that_changed_between_schema_versions_are_named_or_known() -> None:
    bare = {"mode": "replay", "implementation": "torch", "replay": {"window": 4}}
    cfg = config(("*gdn_state_quantizer", FP8), decode=bare)
    assert_expected_inline(
        warning_of(cfg),
        """\
Recipe.from_modelopt does not carry over: linear_attention[0].cfg.decode.readout, which is not given (taken as \
'working'); linear_attention[0].cfg.decode.replay.factor_qdq, which is not given (taken as False).""",
    )
    cfg["linear_attention"][0]["cfg"]["schema_version"] = 1
    assert "by value block" in warning_of(cfg)
    with pytest.warns(LattnWarning):
        policy = Recipe.from_modelopt(cfg).resolve(GDN)[1]
    assert policy == Policy(Fp8(), write=Replay(4, factors="fp8_e4m3"), readout="after_write", kernel="reference")


def test_nvfp4_is_carried_over_and_its_other_blocks_are_named() -> None:
    cfg = config(("*gdn_state_quantizer", NVFP4), decode=REPLAY)
    assert "16 key channels" in warning_of(cfg)
    with pytest.warns(LattnWarning):
        assert Recipe.from_modelopt(cfg).resolve(GDN)[1] == Policy(Nvfp4(), write=Replay(8))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"num_bits": 4}, "gdn_state_quantizer.num_bits"),
        ({"num_bits": (5, 2)}, "gdn_state_quantizer.num_bits"),
        ({"num_bits": True}, "gdn_state_quantizer.num_bits"),
        ({"type": "static"}, "gdn_state_quantizer.type"),
        ({"axis": None}, "gdn_state_quantizer.axis"),
        ({"axis": (0, 1, 2)}, "gdn_state_quantizer.axis"),
        ({"unsigned": True}, "gdn_state_quantizer.unsigned"),
        ({"pass_through_bwd": False}, "gdn_state_quantizer.pass_through_bwd"),
        ({"fake_quant": False}, "gdn_state_quantizer.fake_quant"),
        ({"rotate": True}, "gdn_state_quantizer.rotate"),
        ({"rotate": {"enable": True}}, "gdn_state_quantizer.rotate"),
        ({"bias": {-1: None}}, "gdn_state_quantizer.bias"),
        ({"backend": "psx_luts"}, "gdn_state_quantizer.backend"),
        ({"block_sizes": 32}, "gdn_state_quantizer.block_sizes"),
        ({"block_sizes": {0: 32}}, "gdn_state_quantizer.block_sizes"),
        ({"block_sizes": {-1: 32, "scale_bits": (4, 3)}}, "gdn_state_quantizer.block_sizes"),
        ({"num_bits": (2, 1), "block_sizes": {-1: 32}}, "gdn_state_quantizer.block_sizes"),
        ({"numbits": 8}, "numbits"),
    ],
)
def test_a_quantizer_without_a_counterpart_is_refused_by_name(change: dict[str, Any], argument: str) -> None:
    error = error_of(config(("*gdn_state_quantizer", {**INT8, **change})))
    assert isinstance(error, RecipeError) and error.argument == argument


CFG = "linear_attention[0].cfg"


@pytest.mark.parametrize(
    ("cfg", "argument"),
    [
        ({"backend": "flash"}, f"{CFG}.backend"),
        ({"schema_version": 4}, f"{CFG}.schema_version"),
        ({"chunk_size": 32}, f"{CFG}.chunk_size"),
        ({"matmul": {"wy_key": {"reduction_block": 32}}}, f"{CFG}.matmul"),
        ({"elementwise": {"gate_exp": "bfloat16"}}, f"{CFG}.elementwise"),
        ({"state": {"quantize_initial": False}}, f"{CFG}.state.quantize_initial"),
        ({"solve": {"method": "newton"}}, f"{CFG}.solve.method"),
        ({"decode": {"mode": "sliding"}}, f"{CFG}.decode.mode"),
        ({"decode": {**TOKEN, "implementation": "cuda"}}, f"{CFG}.decode.implementation"),
        ({"decode": {**TOKEN, "readout": "both"}}, f"{CFG}.decode.readout"),
        ({"decode": {**TOKEN, "state_codec": "int8_hadamard32"}}, f"{CFG}.decode.state_codec"),
        ({"decode": {**TOKEN, "decay_log_step": 0.5}}, f"{CFG}.decode.decay_log_step"),
        ({"decode": {**TOKEN, "prefill_state_qdq": True}}, f"{CFG}.decode.prefill_state_qdq"),
        ({"decode": {**TOKEN, "replay": {"window": 8}}}, f"{CFG}.decode.replay"),
        ({"decode": {"mode": "replay"}}, f"{CFG}.decode.replay"),
        ({"decode": {"mode": "replay", "replay": {"encoding": "reencode"}}}, f"{CFG}.decode.replay.encoding"),
        ({"decode": {"mode": "replay", "replay": {"window": 65}}}, "window"),
        ({"decode": {"mode": "replay", "replay": 8}}, f"{CFG}.decode.replay"),
        ({"decode": {"mod": "token"}}, "mod"),
        ({"decode": "token"}, f"{CFG}.decode"),
        ({"state": {"blok_v": 64}}, "blok_v"),
        ({"state": {"block_v": 0}}, None),
        ({"decod": {}}, "decod"),
    ],
)
def test_a_schedule_without_a_counterpart_is_refused_by_name(cfg: dict[str, Any], argument: str | None) -> None:
    error = error_of(config(("*gdn_state_quantizer", INT8), **cfg))
    assert argument is None or error.argument == argument


@pytest.mark.parametrize(
    "cfg",
    [
        None,
        [],
        {},
        {"quant_cfg": 3},
        {"quant_cfg": [3]},
        {"quant_cfg": [{"enable": True}]},
        {"quant_cfg": [OFF]},
        {"quant_cfg": [{**OFF, "enabled": True}]},
        {"quant_cfg": [{"quantizer_name": "*state_quantizer", "cfg": 8}]},
        {"quant_cfg": [{"quantizer_name": "*state_quantizer", "cfg": [INT8, FP8]}]},
        {"quant_cfg": [{"quantizer_name": "*state_quantizer", "cfg": INT8, "enable": "no"}]},
        {"quant_cfg": [{"quantizer_name": "*gdn_state_quantizer", "cfg": INT8, "parent_class": "GatedDeltaNet"}]},
        {"quant_cfg": [{"quantizer_name": "*gdn_w_quantizer", "cfg": FP8}]},
        {"quant_cfg": [{"quantizer_name": "*linear_attn_sites.*", "cfg": FP8}]},
        {"linear_attention": {}},
        {"linear_attention": [{}]},
        {"linear_attention": [{"module_name": "*", "config": {}}]},
    ],
)
def test_what_is_no_such_dictionary_is_refused(cfg: Any) -> None:
    assert isinstance(error_of(cfg), RecipeError)


def test_globs_that_cross_are_refused_rather_than_guessed() -> None:
    cfg = config(("*.linear_attn.gdn_state_quantizer", INT8))
    cfg["linear_attention"][0]["module_name"] = "model.layers.[0-3].*"
    error = error_of(cfg)
    assert_expected_inline(
        str(error),
        """\
[recipe] linear_attention: got 'model.layers.[0-3].*' and '*.linear_attn'; want globs of which one contains the \
other. Spell the sites out.""",
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.text(max_size=4) | st.sampled_from(["token", "replay", "*"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["mode", "replay", "window", "block_v", "cfg", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = ["num_bits", "axis", "type", "block_sizes", "enable", "rotate", "bias"]


@given(st.sampled_from(KEYS), st.sampled_from(["state", "decode", "solve", "backend", "replay_window"]), json_values)
def test_hostile_data_gives_a_recipe_or_an_error_of_ours(attribute: str, setting: str, value: Any) -> None:
    for cfg in (
        config(("*state_quantizer", {**INT8, attribute: value})),
        config(("*state_quantizer", INT8), **{setting: value}),
        {"quant_cfg": value, "linear_attention": [{"module_name": "*", "cfg": value}]},
        {"quant_cfg": [{"quantizer_name": "*state_quantizer", "cfg": value}]},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                recipe = Recipe.from_modelopt(cfg)
            except LattnError:
                continue
        assert Recipe.from_dict(recipe.to_dict()) == recipe
