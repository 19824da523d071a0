"""The answers of a farm, declared once: the service writes by these types, and the clients read them.

OpenAPI, the tables of the command line and the generated client are made from them. An answer is a frozen dataclass;
the text behind a field is its description. A later version may add fields.
"""
