"""Spelled-out recurrences: found in functional ATen graphs by what they compute, not by how they are written."""
