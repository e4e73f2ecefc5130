"""One step of RL on the host: roll out, draw, credit, pack, measure."""
