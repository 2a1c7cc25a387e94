"""The command line's table of contents: each subcommand lives in the file of its name and registers here."""

from __future__ import annotations

import typer

from .. import __version__
from .demo import demo
from .doctor import doctor
from .eds import eds
from .ext_proc import ext_proc
from .indexer import indexer
from .settings import settings
from .sim_replica import sim_replica
from .status import status
from .tokens import tokens

app = typer.Typer(
    name="prefix-router",
    help="Place each LLM request on the replica where serving it costs least.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.command()(demo)
app.command()(eds)
app.command("ext-proc")(ext_proc)
app.command()(indexer)
app.command()(settings)
app.command("sim-replica")(sim_replica)
app.command()(status)
app.command()(tokens)
app.command()(doctor)
