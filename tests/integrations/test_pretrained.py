"""What transformers' `save_pretrained` writes of an attached model, and that it comes back from there."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile.attach import attached_recipe
from lattn_compile.policy import RECIPE_FILE
from lattn_compile.saved_recipe import KEY
from lattn_compile.testing.backend import recorded
from tests import tiny_models

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

RECIPE = lc.Recipe(rules=[("model.layers.*.linear_attn", lc.Policy(lc.Int8())), ("*", None)])


def _model(recipe: Any = RECIPE, seed: int = 0) -> Any:
    model, _ = tiny_models.build("qwen3_next", layers=2, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.LattnWarning)
        return model if recipe is None else lc.attach(model, recipe)


def _keys(folder: Path) -> list[str]:
    names = []
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as weights:
            names += list(weights.keys())
    return names


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lc.LattnWarning)
        yield


def test_the_recipe_lies_beside_weights_that_are_what_they_were_without_it(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "with")
    _model(None).save_pretrained(tmp_path / "without")
    names = {p.name for p in (tmp_path / "with").iterdir()}
    assert names - {p.name for p in (tmp_path / "without").iterdir()} == {RECIPE_FILE}
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    assert lc.Recipe.from_pretrained(tmp_path / "with") == RECIPE


def test_a_model_from_pretrained_takes_the_recipe_of_its_folder_and_computes_the_same_bits(tmp_path: Path) -> None:
    model = _model()
    model.save_pretrained(tmp_path)
    restored = lc.attach(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)
    assert attached_recipe(restored) == RECIPE
    ids = torch.randint(2, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    found: list[list[torch.Tensor]] = []
    with recorded() as record:
        for m in (model, restored):
            m.train()
            with lc.training_phase(5):
                out = torch.compile(m, backend="lattn_compile", fullgraph=True)(ids, labels=ids, use_cache=False)
                out.loss.backward()
            found.append([out.logits, out.loss, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert [c.arguments["state_format"] for c in record.calls] == ["int8/*x64"] * 2
    assert len(found[0]) > 20 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_saving_again_and_again_keeps_the_newest_recipe(tmp_path: Path) -> None:
    model = _model()
    for recipe in ("fp8", RECIPE, "exact"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lc.LattnWarning)
            lc.attach(model, recipe)
        model.save_pretrained(tmp_path)
        assert lc.Recipe.from_pretrained(tmp_path) == attached_recipe(model)


def test_shards_and_a_given_state_dict_have_no_entry_either_and_the_given_one_is_not_changed(tmp_path: Path) -> None:
    model = _model()
    state = model.state_dict()
    model.save_pretrained(tmp_path / "given", state_dict=state)  # as the Trainer does it
    model.save_pretrained(tmp_path / "position", True, state)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    model.save_pretrained(save_directory=str(tmp_path / "keyword"))
    assert KEY in state
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for folder in tmp_path.iterdir():
        assert not [k for k in _keys(folder) if KEY in k], folder.name
        assert len(_keys(folder)) == len(state) - 1
        assert lc.Recipe.from_pretrained(folder) == RECIPE


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / RECIPE_FILE).exists()


def test_a_model_without_recipe_is_saved_as_ever(tmp_path: Path) -> None:
    _model()
    plain = _model(None)
    plain.save_pretrained(tmp_path / "never")
    lc.detach(_model()).save_pretrained(tmp_path / "detached")  # type: ignore[operator]
    for folder in tmp_path.iterdir():
        assert not (folder / RECIPE_FILE).exists() and not [k for k in _keys(folder) if KEY in k]
    with pytest.raises(TypeError, match="save_directory"):
        plain.save_pretrained()


def test_a_stale_recipe_in_the_folder_is_pointed_out(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path)
    with pytest.warns(lc.LattnWarning, match="of an earlier save"):
        _model(None).save_pretrained(tmp_path)


def test_a_recipe_of_a_part_or_of_something_around_is_not_written_and_that_is_said(tmp_path: Path) -> None:
    outer = _model(None)
    lc.attach(outer.model, "int8")
    with pytest.warns(lc.LattnWarning, match="attached to modules inside this model"):
        outer.save_pretrained(tmp_path / "inside")
    wrapped = _model(None)
    lc.attach(torch.nn.ModuleDict({"lm": wrapped}), "int8")
    with pytest.warns(lc.LattnWarning, match="a module around this model"):
        wrapped.save_pretrained(tmp_path / "around")
    for folder in tmp_path.iterdir():
        assert not (folder / RECIPE_FILE).exists() and not [k for k in _keys(folder) if KEY in k]


def test_the_method_is_wrapped_once_and_keeps_its_name_and_signature() -> None:
    _model()
    first = transformers.PreTrainedModel.save_pretrained
    _model("fp8")
    assert transformers.PreTrainedModel.save_pretrained is first
    assert first.__name__ == "save_pretrained" and first.__doc__ == first.__wrapped__.__doc__


def test_an_unpickled_model_saves_its_recipe_in_a_process_where_nobody_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(_model())
    cls = transformers.PreTrainedModel
    monkeypatch.setattr(cls, "save_pretrained", cls.save_pretrained.__wrapped__)
    pickle.loads(data).save_pretrained(tmp_path)
    assert lc.Recipe.from_pretrained(tmp_path) == RECIPE and not [k for k in _keys(tmp_path) if KEY in k]


def test_pushing_uploads_the_recipe_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    class Hub:
        """Whatever is asked of a hub, without a network."""

        repo_id = "someone/model"

        def create_repo(self, *args: Any, **kwargs: Any) -> Hub:
            return self

        def save(self, file: str) -> None:
            Path(file).write_text("a model card")

    uploaded: list[str] = []

    def upload(self: Any, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any) -> None:
        uploaded.extend(p.name for p in Path(working_dir).iterdir() if p.name not in files_timestamps)

    monkeypatch.setattr(modeling_utils, "hf_api", Hub, raising=False)
    monkeypatch.setattr(modeling_utils, "create_repo", Hub().create_repo, raising=False)
    monkeypatch.setattr(modeling_utils, "create_and_tag_model_card", lambda *a, **k: Hub())
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    model = _model()
    model.save_pretrained(tmp_path / "a", push_to_hub=True)
    assert {RECIPE_FILE, "model.safetensors"} <= set(uploaded)
    with pytest.warns(lc.LattnWarning, match="too late to be uploaded"):
        model.save_pretrained(tmp_path / "b", push_to_hub=True, state_dict=model.state_dict())
    assert lc.Recipe.from_pretrained(tmp_path / "b") == RECIPE
