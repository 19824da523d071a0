"""A whole farm on this machine: `up` is the program, `parts` are its children, `ports` asks for the API's port."""
