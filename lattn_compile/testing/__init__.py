"""Helpers for tests of this library and of what is built on it: a float64 oracle, and inputs for every kind."""

from __future__ import annotations

from lattn_compile.testing.gates import RAW_GATES, RawGate, make_raw_gate
from lattn_compile.testing.inputs import HOSTILE, Inputs, make_inputs
from lattn_compile.testing.oracle import OracleResult, oracle, straight_through

__all__ = [
    "HOSTILE",
    "RAW_GATES",
    "Inputs",
    "OracleResult",
    "RawGate",
    "make_inputs",
    "make_raw_gate",
    "oracle",
    "straight_through",
]
