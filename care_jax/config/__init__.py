"""The configuration's keys, their checks, and what a resumed run may change."""
