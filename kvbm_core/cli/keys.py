"""``kvbm keys``: by which keys machines know each other."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from kvbm_core.cli.completion import by_shell
from kvbm_core.cli.console import fail
from kvbm_core.cli.options import Json
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}", re.ASCII)

keys_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="The keys by which machines know each other (CURVE, of ZMQ), and by which they know operators.",
)


@keys_app.command("new")
def new_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Made if it is not there.", autocompletion=by_shell)
    ],
    name: Annotated[
        str, typer.Option(help="Of this machine, as others call it: its address or host name.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Makes a key pair: FOLDER/NAME.key_secret, for this machine alone, and FOLDER/NAME.key, for all others.

    Nothing that is there is overwritten. Exit status 2 if the keys cannot be made.
    """
    from kvbm_core.fleet.keys import ALLOWED, KEY_FILE, new_keys  # zmq: not for the other commands

    name = name or socket.gethostname()
    if not _NAME.fullmatch(name):
        fail(f"kvbm keys: --name {name!r}: write a host name or an address", BAD_USAGE_EXIT)
    try:
        public, secret = new_keys(folder, name)
    except FileExistsError as error:
        if not folder.is_dir():
            fail(f"kvbm keys: {folder} is no folder", BAD_USAGE_EXIT)
        fail(f"kvbm keys: {error.filename} is there already; remove it, or choose a --name", BAD_USAGE_EXIT)
    except OSError as error:
        fail(f"kvbm keys: {error.filename}: {error.strerror}", BAD_USAGE_EXIT)
    variables = {KEY_FILE: str(secret.absolute()), ALLOWED: str(folder.absolute())}
    if as_json:
        typer.echo(json.dumps({**variables, "public_key_file": str(public.absolute())}, indent=2))
        return
    typer.echo("\n".join(f"export {variable}={value}" for variable, value in variables.items()))
    typer.echo(f"Copy {public.name} to that folder of each machine that this one is to speak with.", err=True)


@keys_app.command("operator")
def operator_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="For the secret; nothing is overwritten.", autocompletion=by_shell
        ),
    ],
    as_json: Json = False,
) -> None:
    """Makes the key by which you give orders to a fleet (kvbm fleet --key FILE), and prints its public part.

    Exit status 2 if it cannot be made.
    """
    from kvbm_core.control.operators import OPERATORS, new_operator_key

    try:
        public = new_operator_key(file)
    except ConfigError as error:
        fail(str(error), BAD_USAGE_EXIT)
    except OSError as error:
        fail(f"kvbm keys: {error.filename}: {error.strerror}", BAD_USAGE_EXIT)
    if as_json:
        typer.echo(json.dumps({OPERATORS: public}, indent=2))
        return
    typer.echo(f"export {OPERATORS}={public}")
    typer.echo("Set that for the engines that are to take orders from you.", err=True)
