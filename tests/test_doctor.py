from __future__ import annotations

import os
import sys

import pytest

from lattn_compile import doctor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GPU machine on which all is well; a test changes the versions it reports."""
    versions = {"torch": "2.13.0+cu130", "triton": "3.7.1", "transformers": "5.24.0", "fla-core": "0.6.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor, "_gpus", lambda: [("NVIDIA H200", (9, 0))])
    monkeypatch.setattr(doctor, "_compiler", lambda: doctor.Check("C++ compiler", "/usr/bin/g++", "ok"))
    return versions


def state(name: str) -> str | None:
    return next((c.state for c in doctor.checks() if c.name == name), None)


def test_a_good_machine_gets_no_remark(machine: dict[str, str]) -> None:
    assert [c for c in doctor.checks() if c.remark] == []
    assert next(c.found for c in doctor.checks() if c.name == "gpu 0") == "NVIDIA H200 (sm_90)"


@pytest.mark.parametrize(
    ("version", "bad"), [("3.3.1", False), ("3.4.0", True), ("3.6.0", True), ("3.7.0", True), ("3.7.1", False)]
)
def test_triton_known_to_be_wrong_on_hopper_is_named(machine: dict[str, str], version: str, bad: bool) -> None:
    machine["triton"] = version
    assert (state("triton on Hopper") == "warning") is bad


def test_the_same_triton_elsewhere_is_fine(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine["triton"] = "3.6.0"
    monkeypatch.setattr(doctor, "_gpus", lambda: [("NVIDIA A100", (8, 0))])
    assert state("triton on Hopper") is None


def test_torch_is_required_and_the_rest_optional(machine: dict[str, str]) -> None:
    machine.clear()
    assert [state(n) for n in ("torch", "triton", "transformers", "fla")] == [
        "problem",
        "missing",
        "missing",
        "missing",
    ]


def test_versions_are_compared_as_numbers(machine: dict[str, str]) -> None:
    machine.update({"torch": "2.9.1", "transformers": "5.9.0"})
    assert (state("torch"), state("transformers")) == ("problem", "warning")


@pytest.mark.skipif(sys.platform != "linux", reason="compiler names differ")
def test_a_missing_compiler_is_a_problem_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.cxx_compiler() is None
    check = doctor._compiler()
    assert (check.found, check.state) == ("g++ not found", "problem")
    assert "apt-get install g++" in check.remark


def test_the_compiler_named_by_CXX_is_the_one_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert doctor.cxx_compiler() == sys.executable
    assert doctor._compiler().state == "ok"
