"""What people call: the Python functions, the command line, reports and pages."""
