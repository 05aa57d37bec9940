"""`spot-batch replay`: one published sample again."""

from __future__ import annotations

from typing import Annotated

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Out


@plain_errors
def replay(
    out: Out,
    row: Annotated[str, typer.Option(help="The row's custom_id.")],
    sample: Annotated[int, typer.Option(help="Which of its samples.")] = 0,
    as_json: Json = False,
) -> int:
    """Decode one published sample again, draft-free: identical, or the first difference."""
    import json
    from dataclasses import asdict

    from spot_batch.jobdir.directory import JobDirectory
    from spot_batch.jobdir.mirror import folder_of
    from spot_batch.service.progress import Exit
    from spot_batch.service.replay import replay as decode_again
    from spot_batch.terminal.screen import Screen

    again = decode_again(JobDirectory.open(folder_of(out)), row, sample_index=sample)
    code = Exit.CHECK_FAILED if again.differing else Exit.COMPLETE
    if as_json:
        print(json.dumps(asdict(again)))
        return code
    screen = Screen()
    if not again.differing:
        screen.line(f"identical: {again.num_tokens} tokens")
        return code
    screen.line(f"differs in {', '.join(again.differing)}", style="bold yellow")
    first = again.difference
    if first is not None:
        screen.line(
            f"first at forward {first.forward}: token {first.token_id} at position "
            f"{first.position} where {first.published_token_id} at {first.published_position} was "
            f"published; ahead by {first.gap:g} ({first.kind})"
        )
    screen.quoted(again.generation)
    return code
