"""The method of the paper, per prompt: selection, advantages, objective, credit, spans."""
