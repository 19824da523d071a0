"""Every operation of a farm, declared once: a typed function with one decorator (`Op`).

The signature, the docstring and the return type of the function are the declaration. These surfaces follow from it:
the route and its place in the OpenAPI document (`api.dispatch`), the command (`cli.made`), the methods of the clients
(`client.operations`, a generated file), and the call in process. A module holds the operations of one subject.
"""

from __future__ import annotations

from importlib import import_module

from dataloader.ops.op import OPS, Op

SUBJECTS = ("jobs", "queues", "limits", "farm", "failures", "webhooks", "schedules", "backfills")
# Operations whose answers are not masked: the schema of a property called password is no secret, and to mask the ids of
# thousands of jobs takes long.
UNMASKED = frozenset({"args_schema", "trigger_many"})


def load() -> dict[str, Op]:
    """All operations by name."""
    for subject in SUBJECTS:
        import_module(f"dataloader.ops.{subject}")
    return OPS
