"""The methods of the clients, declared once: `AsyncClient` awaits the coroutines that the other clients carry out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from functools import cache, wraps
from inspect import Parameter, isawaitable, signature
from math import inf
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from dataloader.client.wire import new_key

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Work = Coroutine[Any, Any, R]
Given = dict[str, Any]
Declared = Callable[Concatenate[Any, P], R]
_signature = cache(signature)


def finished(work: Work[R]) -> R:
    """Carry out a coroutine whose calls all block; returns what it returns."""
    try:
        work.send(None)
    except StopIteration as e:
        result: R = e.value
        return result
    raise AssertionError("a call has not blocked")


def each(rows: AsyncGenerator[R, None]) -> Iterator[R]:
    """The rows of an asynchronous generator whose calls all block."""
    while True:
        try:
            row = finished(rows.__anext__())
        except StopAsyncIteration:
            return
        yield row


async def answered(value: Any) -> Any:
    """The answer of a call, which is awaited where it does not block."""
    return await value if isawaitable(value) else value


class Awaited:
    """The base of a client whose methods are awaited."""


class Method(Generic[P, A, R]):
    """A method that returns a coroutine or an asynchronous iterator (A), and its result where the client blocks."""

    def __init__(self, waiting: Callable[..., Any], carry: Callable[[Any], Any] = finished) -> None:
        @wraps(waiting)
        def blocking(farm: Any, /, *args: Any, **kwargs: Any) -> Any:
            return carry(waiting(farm, *args, **kwargs))

        self._waiting: Any = waiting
        self._blocking: Any = blocking

    @overload
    def __get__(self, farm: Awaited, owner: Any) -> Callable[P, A]: ...

    @overload
    def __get__(self, farm: object, owner: Any) -> Callable[P, R]: ...

    def __get__(self, farm: object, owner: Any) -> Any:
        function = self._waiting if issubclass(owner, Awaited) else self._blocking
        return function.__get__(farm, owner)


def carried(method: Declared[P, Work[R]]) -> Method[P, Work[R], R]:
    """The coroutine function as a method."""
    made = Method[P, Work[R], R](method)
    made._blocking.__signature__ = signature(method)
    del made._blocking.__wrapped__  # unittest.mock would take the blocking method for a coroutine function
    return made


def call(
    route: str, answer: type[Any], field: str = "", *, once: bool = False
) -> Callable[[Declared[P, R]], Method[P, Work[R], R]]:
    """The method of the operation of this route: it returns the answer, or one field of that."""

    def method(declared: Declared[P, R]) -> Method[P, Work[R], R]:
        @wraps(declared)
        async def waiting(farm: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = await farm._call(route, answer, _arguments(declared, *args, **kwargs), once=once)
            return getattr(result, field) if field else result

        return Method(waiting)

    return method


def pages(
    route: str, answer: type[Any], field: str, most: int
) -> Callable[[Declared[P, Iterator[R]]], Method[P, AsyncIterator[R], Iterator[R]]]:
    """The method of a list: the rows of all pages, at most `limit`; a page of up to `most` comes as they are taken."""

    async def rows(farm: Any, given: Given) -> AsyncGenerator[Any, None]:
        left: float = given.get("limit", inf)
        while left > 0:
            given["limit"] = int(min(most, left))
            page = await farm._call(route, answer, given)
            items = getattr(page, field)
            for row in items:
                yield row
            left, given["after"] = left - len(items), page.next
            if page.next is None:
                return

    def method(declared: Declared[P, Iterator[R]]) -> Method[P, AsyncIterator[R], Iterator[R]]:
        @wraps(declared)
        def waiting(farm: Any, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            return rows(farm, _arguments(declared, *args, **kwargs))

        return Method(waiting, each)

    return method


def total(route: str, answer: type[Any], field: str) -> Callable[[Declared[P, int]], Method[P, Work[int], int]]:
    """The method that repeats an operation until the end, and returns the sum of this field of its answers."""

    def method(declared: Declared[P, int]) -> Method[P, Work[int], int]:
        @wraps(declared)
        async def waiting(farm: Any, /, *args: Any, **kwargs: Any) -> int:
            given = _arguments(declared, *args, **kwargs)
            count: int = 0
            while True:
                step = await farm._call(route, answer, given, once=True)
                count += getattr(step, field)
                following = getattr(step, "next", None)
                if following is None and getattr(step, "is_done", True):
                    return count
                given |= {"after": following} if following else {}

        return Method(waiting)

    return method


def _arguments(declared: Callable[..., Any], *args: Any, **kwargs: Any) -> Given:
    """The arguments of an operation: those that are not None or have no default, its words, an idempotency key."""
    declared(None, *args, **kwargs)  # its TypeError, for wrong arguments, names the method
    declaration = _signature(declared)
    given: Given = declaration.bind(None, *args, **kwargs).arguments
    words: Given = given.pop("words", {})
    parameters = declaration.parameters
    del given["self"]
    if "idempotency_key" in parameters:
        given["idempotency_key"] = given.get("idempotency_key") or new_key()
    needed = {name for name, each in parameters.items() if each.default is Parameter.empty}
    return {name: value for name, value in given.items() if value is not None or name in needed} | words
