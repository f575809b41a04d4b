"""Recipes: which site gets which policy, their JSON files, and everything a `policy=` option may be."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from lattn_compile import policy as policy_module
from lattn_compile.errors import FileFormatError, FormatError, LattnError, PolicyError, RecipeError, UnsupportedError
from lattn_compile.formats import Fp8, Fp32, Int8, Nvfp4
from lattn_compile.policy import PRESETS, Exact, Policy, Recipe, Replay, Token, TwoPrecision, resolve_recipe

PATH = "model.layers.3.linear_attn"
SITE = PATH + "/gdn#0"
INT8, FP8 = PRESETS["int8"], PRESETS["fp8"]

recipes = st.builds(
    Recipe,
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=12),
            st.sampled_from([None, *PRESETS, *PRESETS.values(), Policy(Int8(3, block_k=5), seed=7, gate="bf16")]),
        ),
        max_size=4,
    ),
)


def error_of(call: Any) -> LattnError:
    with pytest.raises(LattnError) as caught:
        call()
    return caught.value


# --- presets


def test_presets_are_those_of_the_public_contract() -> None:
    assert dict(PRESETS) == {
        "exact": Policy(Fp32(), write=Exact()),
        "int8": Policy(Int8(64), write=Token()),
        "fp8": Policy(Fp8(64), write=Token()),
        "int8-replay": Policy(Int8(64), write=Replay(8)),
        "fp8-replay": Policy(Fp8(64), write=Replay(8)),
        "nvfp4": Policy(Nvfp4(), write=Replay(16)),
        "fp8-two-precision": Policy(write=TwoPrecision(16, read=Fp8(1, block_k=128), anchor="fp32")),
    }
    assert policy_module.PRESETS["fp8"] == Policy()


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["int8"] = FP8  # type: ignore[index]


# --- rules


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        ("*", True),
        ("model.layers.*.linear_attn", True),
        ("model.layers.*", True),
        ("*linear_attn", True),
        ("model.*", True),
        ("model.layers.?.linear_attn", True),
        ("model.layers.[0-3].linear_attn", True),
        ("model.layers.[!3].linear_attn", False),
        (PATH, True),
        (SITE, True),
        (PATH + "/gdn#*", True),
        ("*/gdn#0", True),
        ("*/kda#*", False),
        ("*/gdn#1", False),
        ("MODEL.*", False),
        ("layers.3.linear_attn", False),
        ("model.layers.*.self_attn", False),
        ("model.layers.3", False),
    ],
)
def test_a_glob_is_matched_against_the_path_and_against_the_id(glob: str, matches: bool) -> None:
    want = (0, INT8) if matches else (None, None)
    assert Recipe([(glob, INT8)]).resolve(SITE) == want


def test_a_bare_path_matches_as_its_id_does_and_leaves_the_kind_open() -> None:
    assert Recipe([("model.layers.*.linear_attn", INT8)]).resolve(PATH) == (0, INT8)
    assert Recipe([("model.layers.*/kda#*", INT8)]).resolve(PATH) == (0, INT8)
    assert Recipe([("encoder.*/gdn#*", INT8)]).resolve(PATH) == (None, None)


def test_the_first_rule_that_matches_wins() -> None:
    recipe = Recipe([("*.4.*", "exact"), ("model.*", INT8), ("*", FP8)])
    assert recipe.resolve(SITE) == (1, INT8)
    assert recipe.resolve("model.layers.4.linear_attn/gdn#0") == (0, PRESETS["exact"])
    assert recipe.resolve("encoder/gla#0") == (2, FP8)


def test_a_site_left_alone_is_told_from_one_without_a_rule() -> None:
    recipe = Recipe([("model.layers.0.*", INT8), ("model.layers.3.*", None)])
    assert recipe.resolve(SITE) == (1, None)
    assert recipe.resolve("model.layers.4.linear_attn/gdn#0") == (None, None)


@pytest.mark.parametrize(
    ("rules", "argument"),
    [
        ("int8", "rules"),
        (None, "rules"),
        (3, "rules"),
        ({"*": INT8}, "rules"),
        (["*"], "rules"),
        ([("*", INT8, 1)], "rules"),
        ([("*",)], "rules"),
        ([(None, INT8)], "rules[0]"),
        ([("*", INT8), ("", INT8)], "rules[1]"),
        ([("*", Int8())], "rules[0] ('*')"),
        ([("*", {})], "rules[0] ('*')"),
    ],
)
def test_rules_of_another_shape_are_refused(rules: Any, argument: str) -> None:
    error = error_of(lambda: Recipe(rules=rules))
    assert isinstance(error, RecipeError) and error.argument == argument


def test_messages_say_what_is_wanted_and_what_to_do() -> None:
    assert_expected_inline(
        str(error_of(lambda: Recipe(rules={"*": 1}))),  # type: ignore[arg-type, dict-item]
        """\
[recipe] rules: got {'*': 1}; want a list of (glob, policy) pairs. For one policy everywhere: rules=[("*", policy)].""",
    )
    assert_expected_inline(
        str(error_of(lambda: Recipe([("*", "int8"), ("a.*", "int8_replay")]))),
        """\
[policy] rules[1]: got 'int8_replay'; want a preset: exact, int8, fp8, int8-replay, fp8-replay, nvfp4, \
fp8-two-precision. Correct the name, or build a Policy. Did you mean 'int8-replay'?""",
    )
    assert_expected_inline(
        str(error_of(lambda: Recipe(ruls=[]))),  # type: ignore[call-arg]
        """\
[recipe] ruls: got an unknown key of Recipe; want one of rules. Remove it or correct its name. Did you mean \
'rules'?""",
    )
    assert_expected_inline(
        str(error_of(lambda: Recipe([("a.*", INT8), ("b.*", Policy(storage="packed"))]).require_built())),
        """\
[unsupported] rules[1] ('b.*'): got storage='packed'; want storage 'emulated'. Packed states are stepped by \
lc.QuantizedState and lc.StatePool, and held by caches that quantize_cache made; here the state is dense.""",
    )


def test_an_unbuilt_part_is_named_with_its_rule() -> None:
    Recipe([("a", INT8), ("b", None)]).require_built()
    error = error_of(lambda: Recipe([("a", INT8), ("b", Policy(storage="packed"))]).require_built())
    assert isinstance(error, UnsupportedError) and error.argument == "rules[1] ('b')"


# --- identity


@given(recipes)
def test_a_recipe_survives_json_pickle_hash_and_repr(recipe: Recipe) -> None:
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False)))
    assert again == recipe and hash(again) == hash(recipe) and again.fingerprint() == recipe.fingerprint()
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert dataclasses.replace(recipe) == recipe
    assert eval(repr(recipe)) == recipe


@given(recipes, recipes)
def test_fingerprints_are_equal_exactly_where_recipes_are(a: Recipe, b: Recipe) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


def test_every_field_of_a_policy_is_in_the_fingerprint() -> None:
    base = Policy(Int8())
    changes: list[dict[str, Any]] = [
        {"state": Int8(32)},
        {"state": Int8(block_k=16)},
        {"write": Replay(8)},
        {"write": Replay(9)},
        {"write": Replay(8, factors="bf16")},
        {"readout": "after_write"},
        {"rounding": "stochastic"},
        {"seed": 1},
        {"feedback": "int8"},
        {"rotation": "hadamard_k"},
        {"gate": "bf16"},
        {"prefill": policy_module.Prefill({"kk": "int8"})},
        {"storage": "packed"},
        {"kernel": "reference"},
    ]
    prints = {Recipe([("*", dataclasses.replace(base, **c))]).fingerprint() for c in [{}, *changes]}
    assert len(prints) == len(changes) + 1
    assert {name for c in changes for name in c} == set(base.to_dict())
    assert Recipe([("*", base), ("a", None)]).fingerprint() != Recipe([("a", None), ("*", base)]).fingerprint()


def test_another_process_without_optional_packages_makes_the_same_fingerprint() -> None:
    code = (
        "import sys; [sys.modules.__setitem__(m, None) for m in ('triton', 'transformers', 'fla', 'modelopt')];"
        "from lattn_compile.policy import Recipe; print(Recipe([('a.*', 'nvfp4'), ('*', None)]).fingerprint())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == Recipe([("a.*", "nvfp4"), ("*", None)]).fingerprint()


# --- files


def test_the_file_reads_well_and_comes_back(tmp_path: Path) -> None:
    recipe = Recipe([("model.layers.*.linear_attn", Policy(Int8(32), readout="after_write")), ("*", None)])
    recipe.save(tmp_path / "r.json")
    assert Recipe.load(tmp_path / "r.json") == recipe
    assert_expected_inline(
        (tmp_path / "r.json").read_text(),
        """\
{
  "version": 1,
  "rules": [
    {
      "match": "model.layers.*.linear_attn",
      "policy": {
        "state": {
          "format": "int8",
          "block_v": 32,
          "block_k": null
        },
        "write": {
          "mode": "token"
        },
        "readout": "after_write",
        "rounding": "nearest",
        "seed": 0,
        "feedback": null,
        "rotation": null,
        "gate": null,
        "prefill": null,
        "storage": "emulated",
        "kernel": "auto"
      }
    },
    {
      "match": "*",
      "policy": null
    }
  ]
}
""",
    )


def test_a_recipe_beside_the_weights_is_found(tmp_path: Path) -> None:
    recipe = Recipe([("*", "int8-replay")])
    recipe.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["lattn_recipe.json"]
    assert Recipe.from_pretrained(tmp_path) == recipe == Recipe.from_pretrained(str(tmp_path))


def test_a_folder_without_a_recipe_or_a_name_on_a_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"lattn_recipe\.json"):
        Recipe.from_pretrained(tmp_path)
    with pytest.raises(FileFormatError, match="snapshot_download"):
        Recipe.from_pretrained("org/model")


@pytest.mark.parametrize("version", [2, 99, 0, -1, "1", 1.0, True, None, [1]])
def test_another_version_is_refused_clearly(version: Any) -> None:
    data = {**Recipe([("*", "int8")]).to_dict(), "version": version, "new": 1}
    error = error_of(lambda: Recipe.from_dict(data))
    assert isinstance(error, RecipeError) and error.argument == "version"


def test_a_newer_version_says_upgrade_and_a_missing_one_shows_the_form() -> None:
    assert_expected_inline(
        str(error_of(lambda: Recipe.from_dict({"version": 2, "layers": []}))),
        """\
[recipe] version: got 2; want 1, the version of recipes that this lattn_compile reads. Upgrade lattn_compile: this \
recipe was written by a newer one.""",
    )
    assert_expected_inline(
        str(error_of(lambda: Recipe.from_dict({"rules": []}))),
        """\
[recipe] version: got a recipe without it; want 1, the version of recipes that this lattn_compile reads. A recipe \
looks like {"version": 1, "rules": [{"match": "*", "policy": "int8"}]}.""",
    )


@pytest.mark.parametrize(
    ("data", "kind", "argument"),
    [
        ([], RecipeError, "recipe"),
        ({"version": 1}, RecipeError, "rules"),
        ({"version": 1, "rules": {}}, RecipeError, "rules"),
        ({"version": 1, "rules": [], "ruls": []}, RecipeError, "ruls"),
        ({"version": 1, "rules": [["*", None]]}, RecipeError, "rules[0]"),
        ({"version": 1, "rules": [{"match": "*"}]}, RecipeError, "rules[0]"),
        ({"version": 1, "rules": [{"policy": None}]}, RecipeError, "rules[0]"),
        ({"version": 1, "rules": [{"match": "*", "policy": None, "enable": True}]}, RecipeError, "enable"),
        ({"version": 1, "rules": [{"match": 3, "policy": None}]}, RecipeError, "rules[0]"),
        ({"version": 1, "rules": [{"match": "*", "policy": 3}]}, RecipeError, "rules[0] ('*')"),
        ({"version": 1, "rules": [{"match": "*", "policy": "int9"}]}, PolicyError, "rules[0]"),
        ({"version": 1, "rules": [{"match": "*", "policy": {"stat": {}}}]}, PolicyError, "stat"),
        ({"version": 1, "rules": [{"match": "*", "policy": {"state": {"format": "int9"}}}]}, FormatError, "state"),
    ],
)
def test_a_dict_that_is_no_recipe_is_refused_by_name(data: Any, kind: type[LattnError], argument: str) -> None:
    error = error_of(lambda: Recipe.from_dict(data))
    assert type(error) is kind and error.argument == argument


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "rules", "match", "policy", "state", "write", "mode", "x"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_hostile_data_gives_a_recipe_or_an_error_of_ours(data: Any) -> None:
    for build in (
        Recipe.from_dict,
        resolve_recipe,
        lambda d: Recipe.from_dict({"version": 1, "rules": d}),
        lambda d: Recipe.from_dict({"version": 1, "rules": [{"match": "*", "policy": d}]}),
    ):
        try:
            recipe = build(data)
        except LattnError:
            continue
        assert Recipe.from_dict(recipe.to_dict()) == recipe


# --- whatever policy= may be


def test_every_form_of_the_option_gives_the_same_recipe(tmp_path: Path) -> None:
    want = Recipe([("*", INT8)])
    want.save(tmp_path / "r.json")
    want.save(tmp_path)
    forms: list[Any] = [want, INT8, INT8.to_dict(), {"state": "int8"}, want.to_dict(), "int8"]
    forms += [tmp_path / "r.json", str(tmp_path / "r.json"), tmp_path, str(tmp_path)]
    for form in forms:
        assert resolve_recipe(form) == want, form


def test_no_recipe_is_exact() -> None:
    assert resolve_recipe(None) == Recipe([("*", "exact")])


def test_a_preset_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recipe([("*", "fp8")]).save(tmp_path / "int8")
    monkeypatch.chdir(tmp_path)
    assert resolve_recipe("int8") == Recipe([("*", INT8)])
    assert resolve_recipe("./int8") == Recipe([("*", FP8)])


def test_what_is_no_policy_is_refused_with_the_option_named() -> None:
    assert_expected_inline(
        str(error_of(lambda: resolve_recipe("nvpf4"))),
        """\
[policy] policy: got 'nvpf4'; want a preset: exact, int8, fp8, int8-replay, fp8-replay, nvfp4, fp8-two-precision. \
Correct the name, or build a Policy. Did you mean 'nvfp4'?""",
    )
    assert_expected_inline(
        str(error_of(lambda: resolve_recipe(8, "options['policy']"))),
        """\
[recipe] options['policy']: got 8; want a Recipe, a Policy, a dict, a preset's name or the path of a recipe's JSON \
file. Start from a preset: exact, int8, fp8, int8-replay, fp8-replay, nvfp4, fp8-two-precision.""",
    )
    assert_expected_inline(
        str(error_of(lambda: resolve_recipe("missing/recipe.json"))),
        """\
[file] path: got 'missing/recipe.json', which cannot be read; want a JSON file. No such file or directory.""",
    )
    assert isinstance(error_of(lambda: resolve_recipe(Int8())), RecipeError)
    assert isinstance(error_of(lambda: resolve_recipe(Policy)), RecipeError)
    assert isinstance(error_of(lambda: resolve_recipe("recipe.json")), FileFormatError)


def test_a_format_alone_is_no_policy_and_the_error_says_what_is() -> None:
    with pytest.raises(RecipeError, match=r"got Int8\(.*A format is a part of a policy: lc\.Policy\(lc\.Int8\("):
        resolve_recipe(Int8())
