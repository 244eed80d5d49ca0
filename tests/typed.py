"""What a person types, and what comes of it, in this process."""

from typing import Any

from typer.testing import CliRunner

from polyfed import cli


def call(*args: str, code: int = 0) -> Any:
    """The result of `polyfed ARGS`, which must end with this code."""
    result = CliRunner().invoke(cli.app, list(args), prog_name="polyfed")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
