"""A whole farm on this machine: `dataloader up`.

up              PROCESS checks, starts, watches and stops the parts
parts           a child process that is started again after its end: a program, the embedded PostgreSQL
announcement    the banner, and where the API answers
"""
