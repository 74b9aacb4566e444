"""The user interfaces: the Python functions, the command line, reports and HTML pages."""
