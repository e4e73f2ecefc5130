"""A reward function that workers import: a module of its own, as that of a test imports JAX."""


def graded(question, responses, example):
    """Each of a question's samples by itself."""
    return [{"acc": float(text == "<answer>9</answer>"), "half": 0.5} for text in responses]
