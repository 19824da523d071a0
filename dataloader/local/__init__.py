"""A whole farm on this machine: `up` is the program, `ports` asks for the API's port."""
