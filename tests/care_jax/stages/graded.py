"""A reward function that workers import: a module of its own, as that of a test imports JAX."""


def graded(question, responses, example):
    """Each of a question's samples by itself."""
    return [{"acc": float(text == "<answer>9</answer>"), "half": 0.5} for text in responses]


def forgetful(question, responses, example):
    """Fails on the second question, and on the last of several samples of the fourth."""
    if example.id == "e1":
        raise LookupError("no judge")
    rows = graded(question, responses, example)
    return [*rows[:-1], {}] if example.id == "e3" and len(rows) > 1 else rows


def silent(question, responses, example):
    """Returns the wrong type."""
