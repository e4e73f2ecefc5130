"""To the type checker all of transformers is Any; its own types would double the check's time."""

from typing import Any

def __getattr__(name: str) -> Any: ...
