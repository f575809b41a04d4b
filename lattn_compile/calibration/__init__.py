"""The parts of `lc.calibrate` (`calibrate.py`): recording, measuring, choosing, and the table."""
