"""A pipeline with a model of its args, which costs each worker megabytes."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dataloader.pipelines import register


class Load(BaseModel):
    model_config = ConfigDict(extra="forbid")
    day: str
    limit: int = Field(default=10, ge=1)
    password: str | None = None


def note_type(args: Any) -> None:
    """Note the type of the given args in the folder of the test."""
    with open(os.environ["DL_TEST_TYPES"], "a") as file:
        print(type(args).__name__, file=file)


@register("typed", args=Load, on_exhausted=note_type)
def typed(args: Load) -> dict[str, Any]:
    return {"model": type(args).__name__, "day": args.day, "limit": args.limit}
