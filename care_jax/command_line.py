"""What the commands share: flags are parsed, and what is wrong with them is told in one line."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

# ml_collections puts the traceback of what a config file raised into a message that begins so; what
# it raised is that message's context.
_WRAPPED = "Error whilst parsing config file"


def parse(argv: Sequence[str], config: flags.FlagHolder[ConfigDict]) -> Sequence[str]:
    """Parses all flags that are defined, and loads the file that `config` names, if any.

    Returns:
        what of the command line is no flag, the program's name first.

    Raises:
        ValueError: one line: a flag or key that does not exist, or a file that cannot be loaded.
    """
    try:
        rest = flags.FLAGS(argv)
        if config.value is not None:
            _ = config.value.stages  # a file that could not be loaded is reported when it is used
    except (AttributeError, KeyError, TypeError, ValueError, OSError, flags.Error) as error:
        raise ValueError(" ".join(_message(error).split())) from error
    return rest


def _message(error: Exception) -> str:
    cause = error.args[0] if error.args and isinstance(error.args[0], KeyError) else error
    if isinstance(cause, KeyError):
        key, _, suggestion = str(cause.args[0]).partition("\n")
        return f"no such key: {key}; configs/common.py has all of them. {suggestion}"
    wrapper = error.__context__
    if wrapper is not None and str(wrapper).startswith(_WRAPPED):
        return f"{str(error).partition(_WRAPPED)[0]}{wrapper.__context__}"
    return str(error)
