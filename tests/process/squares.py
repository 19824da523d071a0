"""The function that pools compute, in a module of its own: a spawned process imports it."""


def square(number: int) -> int:
    return number * number
