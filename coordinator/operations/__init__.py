"""Changes by operators, shared by API, page and commands: the class of operations, and the creation of federations."""
