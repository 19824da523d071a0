"""Pipelines with models of their args, for the tests of farms."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dataloader.pipelines import register


class Load(BaseModel):
    model_config = ConfigDict(extra="forbid")
    day: str
    limit: int = Field(default=10, ge=1)
    password: str | None = None


def told(args: Any) -> None:
    """Leave the type of what it was given in the folder of the test."""
    with open(os.environ["DL_TEST_TOLD"], "a") as file:
        print(type(args).__name__, file=file)


@register("typed", args=Load, on_exhausted=told)
def typed(args: Load) -> dict[str, Any]:
    return {"model": type(args).__name__, "day": args.day, "limit": args.limit}
